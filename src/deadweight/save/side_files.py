"""The files of a checkpoint besides its weights: config, tokenizer, and the code that builds slim layers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from torch import nn

from deadweight.errors import DeadweightError
from deadweight.save.auto_classes import OWN_HOME, auto_map, home_of
from deadweight.slim.format import SlimSpec
from deadweight.source.checkpoint_files import PICKLES, is_inside, read_json
from deadweight.source.printable import printable
from deadweight.source.type_aliases import Config
from deadweight.transformer.configuration import TransformerConfig

PACKAGE = Path(__file__).parent.parent
OWN_CODE = [PACKAGE / "transformer" / f"{name}.py" for name in ("shape", "configuration", "modeling")]
MODELING = "modeling_deadweight.py"
RUNTIME = ("scratch", "codes", "format", "layers")  # files of slim/ that a slim checkpoint needs
HEADS = ("attention", "heads")  # those that smaller heads need too
CACHE = (
    "attention",
    "coder",
    "cuda_decode",
    "cuda_source",
    "kernel_sizes",
    "kernel_operands",
    "kernels",
    "cpu_maps",
    "cpu_encode",
    "cache",
    "cpu_decode",
    "coded_attention",
    "decoded_states",
    "install_caches",
)  # those that a coded cache needs too
LARGEST_COPIED = 64 << 20  # bytes: larger files are not copied
NOT_COPIED = {".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".lock", *PICKLES}


def write_side_files(
    draft: Path, folder: Path | None, config: Config, cls: type[nn.Module], slim: SlimSpec | None
) -> None:
    """Write config, tokenizer and other files of the original folder; for slim, the code that builds its layers.

    A link out of the folder is not followed: whoever made the folder would choose a file of the user to publish.
    """
    if folder is not None:
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            plain = file.is_file() and not any(part.startswith(".") for part in inside.parts)
            if plain and is_copied(file) and is_inside(folder, file):
                (draft / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, draft / inside)
    elif config is not None:
        config.save_pretrained(draft)
    if slim is not None and config is None:
        (draft / "slim.json").write_text(json.dumps(slim.to_json()) + "\n", encoding="utf-8")
    elif slim is not None:
        write_slim_code(draft, config, cls, slim)


def write_slim_code(draft: Path, config: Config, cls: type[nn.Module], slim: SlimSpec) -> None:
    """Write the config of a slim checkpoint, and the code that loads it where deadweight is not installed."""
    file = draft / "config.json"
    raw = read_json(file)
    require_its_code(draft, cls)
    classes = auto_map(cls, config, raw, f"{MODELING.removesuffix('.py')}.SlimModel")
    if isinstance(config, TransformerConfig):
        classes |= {"AutoConfig": f"configuration.{TransformerConfig.__name__}"}
        for own in OWN_CODE:
            shutil.copyfile(own, draft / own.name)
    raw |= {"deadweight": slim.to_json(), "auto_map": classes}
    raw.setdefault("architectures", [cls.__name__])
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    more = {*(HEADS if slim.heads else ()), *(CACHE if slim.caches else ())}
    for name in (*RUNTIME, *sorted(more)):
        text = (PACKAGE / "slim" / f"{name}.py").read_text(encoding="utf-8")
        (draft / f"deadweight_{name}.py").write_text(rename_imports(text), encoding="utf-8")
    (draft / MODELING).write_text(modeling_code(cls, slim), encoding="utf-8")


def require_its_code(draft: Path, cls: type[nn.Module]) -> None:
    """Raise if the class is defined in code that is not in the folder: the class of a slim checkpoint builds on it."""
    home = home_of(cls)
    if home.startswith(".") and home != OWN_HOME and not (draft / f"{home[1:]}.py").is_file():
        raise DeadweightError(
            f"{printable(cls.__name__)} is defined in code outside the folder; expected {printable(home[1:])}.py in "
            "it, because a slim checkpoint builds on that class: copy the code there, or choose the stock layout"
        )


def rename_imports(text: str) -> str:
    """The text of a file of slim/ for a checkpoint's folder, where these files have the prefix deadweight_."""
    return re.sub(r"from \.(\w+) import", r"from .deadweight_\1 import", text)


def is_copied(file: Path) -> bool:
    named = file.suffix.lower() in NOT_COPIED or file.name.endswith(".index.json")
    return not named and file.name not in ("README.md", "deadweight.json") and file.stat().st_size <= LARGEST_COPIED


def modeling_code(cls: type[nn.Module], slim: SlimSpec) -> str:
    """The text of the file that defines the model class of a slim checkpoint."""
    imports = ["from .deadweight_format import SlimSpec", "from .deadweight_layers import install"]
    lines = ["install(self, slim)"]
    if slim.heads:
        imports.insert(0, "from .deadweight_heads import install_heads")
        lines.append("install_heads(self, slim.heads)")
    if slim.caches:
        imports.insert(0, "from .deadweight_install_caches import install_caches")
        lines.append("install_caches(self, slim.caches)")
    return "\n".join(
        [
            f'"""{cls.__name__} with the layers that its config describes, in a smaller form."""',
            "",
            f"from {home_of(cls)} import {cls.__name__}",
            "",
            *imports,
            "",
            "",
            f"class SlimModel({cls.__name__}):",
            "    def __init__(self, config, *args, **kwargs):",
            "        super().__init__(config, *args, **kwargs)",
            "        slim = SlimSpec.from_json(config.deadweight)",
            *(f"        {line}" for line in lines),
            "",
        ]
    )
