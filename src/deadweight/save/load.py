"""Loading what deadweight wrote, without running any code from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.slim.format import SlimSpec
from deadweight.slim.layers import install
from deadweight.slim.load import is_slim
from deadweight.source.checkpoint import FileCheckpoint
from deadweight.source.files import read_json
from deadweight.source.hugging import local_folder, locate, model_class, read_config, trusted_class
from deadweight.source.text import printable, reason


def load(
    folder: str | Path, module: nn.Module | None = None, *, trust_remote_code: bool = False, **options: Any
) -> nn.Module:
    """The model in a folder that deadweight wrote (or in any Hugging Face folder), ready to be used.

    `options` go to transformers' from_pretrained (dtype, device_map, …). A reduced module of your own is loaded into
    `module`, a fresh original. A class that only the folder's own code knows takes `trust_remote_code`.
    """
    if module is not None:
        return into(module, Path(folder))
    folder = embedded.path() if str(folder) == "demo" and not Path(folder).exists() else folder
    place = locate(str(folder))
    config = read_config(place, trust_remote_code)
    cls = model_class(config) or (trusted_class(config) if trust_remote_code else None)
    options |= {"trust_remote_code": True} if trust_remote_code else {}
    if cls is None:
        raise DeadweightError(f"{printable(str(folder))} names no model class that transformers knows")
    root = local_folder(str(folder)) or Path(place.root)
    try:
        model, info = cls.from_pretrained(
            str(root), config=config, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # a stranger's files
        raise DeadweightError(f"{printable(str(folder))} cannot be loaded ({reason(error)})") from error
    if is_slim(config) and (missing := sorted(info["missing_keys"])):  # what is not there would be random
        raise DeadweightError(
            f"{printable(str(folder))} has no {printable(missing[0])}; expected a complete checkpoint"
        )
    return model.eval()


def into(module: nn.Module, folder: Path) -> nn.Module:
    """The weights of a reduced module, in a fresh original that is given the same form."""
    install(module, slim_spec(folder))
    weights = FileCheckpoint(folder)
    tensors = under_all_names(module, {name: weights.read(name) for name in weights.names})
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise DeadweightError(f"{printable(str(folder))} does not fit the module ({reason(error)})") from error
    return module.eval()


def slim_spec(folder: Path) -> SlimSpec:
    """How the layers of a module that is not one of transformers are stored."""
    file = folder / "slim.json"
    try:
        return SlimSpec.from_json(read_json(file)) if file.is_file() else SlimSpec()
    except (ValueError, KeyError, AttributeError) as error:
        raise DeadweightError(f"{printable(file)} describes no slim checkpoint ({reason(error)})") from error


def under_all_names(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is tied or shared is stored once, and the module asks for it by each of its names."""
    own = module.state_dict(keep_vars=True)
    stored = {id(own[name]): tensor for name, tensor in tensors.items() if name in own}
    return tensors | {n: stored[id(t)] for n, t in own.items() if n not in tensors and id(t) in stored}
