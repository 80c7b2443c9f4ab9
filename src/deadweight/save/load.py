"""Loading what deadweight wrote, without running any code from the folder."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.slim.format import SlimSpec
from deadweight.slim.layers import install
from deadweight.source.checkpoint import FileCheckpoint
from deadweight.source.checkpoint_files import check_weights, read_json
from deadweight.source.hugging_face import load_weights
from deadweight.source.hugging_face_config import local_folder, locate, read_config
from deadweight.source.model_classes import model_class, trusted_class
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import Options, Setting


def load(
    folder: str | Path, module: nn.Module | None = None, *, trust_remote_code: bool = False, **options: Setting
) -> nn.Module:
    """The model in a folder that deadweight wrote (or in any Hugging Face folder), ready to be used.

    `options` go to transformers' from_pretrained (dtype, device_map, …). A reduced module of your own class is loaded
    into `module`, a new instance of the original. A class that is defined in the folder needs `trust_remote_code`.
    """
    if module is not None:
        return into(module, Path(folder))
    folder = embedded.path() if str(folder) == "demo" and not Path(folder).exists() else folder
    location = locate(str(folder))
    if location.gguf is None and Path(location.root).is_file():
        raise DeadweightError(
            f"{printable(str(folder))} is a config without weights; expected the folder that holds both"
        )
    config = read_config(location, trust_remote_code)
    if location.folder is not None:
        check_weights(location.folder, needed=True)
    cls = model_class(config) or (trusted_class(config) if trust_remote_code else None)
    if cls is None:
        raise DeadweightError(
            f"{printable(str(folder))} names no model class that transformers knows; expected one in its config, or "
            "trust_remote_code=True for a class in its own code"
        )
    root = local_folder(str(folder)) or Path(location.root)
    trust: Options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        model, names = load_weights(cls, str(root), {"config": config, "use_safetensors": True, **options, **trust})
    except DeadweightError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise DeadweightError(f"{printable(str(folder))} cannot be loaded ({reason(error)})") from error
    if names.missing:  # missing parameters would be random
        raise DeadweightError(
            f"{printable(str(folder))} has no {printable(names.missing[0])}; expected a complete checkpoint"
        )
    return model.eval()


def into(module: nn.Module, folder: Path) -> nn.Module:
    """A new instance of the original, with the layers and weights of the reduced module in the folder."""
    install(module, slim_spec(folder))
    weights = FileCheckpoint(folder)
    tensors = under_all_names(module, {name: weights.read(name) for name in weights.names})
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise DeadweightError(
            f"{printable(str(folder))} does not fit the module ({reason(error)}); expected a new original module"
        ) from error
    return module.eval()


def slim_spec(folder: Path) -> SlimSpec:
    """How the layers are stored, for a module that is not a model of transformers."""
    file = folder / "slim.json"
    try:
        return SlimSpec.from_json(read_json(file)) if file.is_file() else SlimSpec()
    except (ValueError, KeyError, AttributeError) as error:
        raise DeadweightError(
            f"{printable(file)} describes no slim checkpoint ({reason(error)}); expected the file that reduce wrote"
        ) from error


def under_all_names(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under all names that the module has for them: tied weights are stored once."""
    own = module.state_dict(keep_vars=True)
    stored = {id(own[name]): tensor for name, tensor in tensors.items() if name in own}
    return tensors | {n: stored[id(t)] for n, t in own.items() if n not in tensors and id(t) in stored}
