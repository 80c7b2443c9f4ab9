"""The lines of Python that load a written folder, for its model card."""

from __future__ import annotations

from torch import nn

from deadweight.save.auto_classes import autos_of, is_own_code
from deadweight.source.type_aliases import Config


def how_to_load(name: str, cls: type[nn.Module], config: Config, *, slim: bool) -> str:
    """Lines for a module of the user's own, a stock checkpoint, or a slim one."""
    if config is None:
        return f'import deadweight\nmodel = deadweight.load("{name}", build())  # build() makes the original module'
    own = (getattr(config, "auto_map", None) or {}) if is_own_code(cls) else {}
    autos = autos_of(cls, config, own)
    auto = autos[0] if autos else "AutoModel" if slim else cls.__name__
    trust = ", trust_remote_code=True" if slim or own else ""
    lines = [f"from transformers import {auto}", f'model = {auto}.from_pretrained("{name}"{trust})']
    if slim and not own:
        lines += [
            "# or, without running code from the folder:",
            "import deadweight",
            f'model = deadweight.load("{name}")',
        ]
    return "\n".join(lines)
