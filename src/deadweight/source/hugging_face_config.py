"""Where the files of a Hugging Face model are, and its config.json: the errors for what is missing or unknown."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import AutoConfig

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.silence import silenced
from deadweight.source.checkpoint_files import read_json
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import Config, RawConfig

ADAPTER = "adapter_config.json"
REPORT = "deadweight.json"  # that `reduce` writes beside the weights
CODE = re.compile(r"(?P<path>[^:]+)\.py(?::(?P<name>[\w.]*))?")  # mypkg/model.py:build
SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")  # package.module:callable
COUNT_OF_LAYERS = re.compile(r"(n|num)_(\w+_)?layers?")
MOST_LAYERS = 10_000
EXPECTED = "expected a folder, a config.json, a .gguf file, a hub id, or package.module:callable"
MERGE = "expected weights that it is merged into (peft: model.merge_and_unload(), then save_pretrained)"
HUB = ("huggingface_hub", "huggingface_hub.utils._http")  # its client logs every retry


@dataclass(frozen=True)
class Location:
    """Where a config and its weights are: a folder, a hub id, or a file."""

    name: str  # what the user gave
    root: str  # the argument of from_pretrained
    gguf: str | None = None  # the file's name inside root
    folder: Path | None = None  # root, if it is a local folder, which may hold weights


def locate(spec: str) -> Location:
    """Where the model is that a folder, a hub id or a file name means."""
    path = Path(spec).expanduser()
    refuse_code(spec)
    if path.suffix.lower() == ".gguf":
        return _gguf(spec, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / ADAPTER).is_file():
                raise DeadweightError(f"{printable(spec)} is an adapter, not a model; {MERGE}")
            if (path / REPORT).is_file():
                raise DeadweightError(
                    f"{printable(spec)} was made from a module, and its class is not in the folder; expected a Hugging "
                    "Face folder: in Python, deadweight.load(folder, module) gives the module"
                )
            raise DeadweightError(f"{printable(spec)} is a folder without config.json; expected a Hugging Face folder")
        return Location(spec, str(path), folder=path)
    if path.is_file() and path.suffix.lower() != ".json":
        raise DeadweightError(
            f"{printable(spec)} is a {path.suffix or 'plain'} file; expected config.json or a .gguf, or the folder "
            "that holds weights and config"
        )
    if path.is_symlink() and not path.exists():
        raise DeadweightError(f"{printable(spec)} is a link to nothing; expected a link to a model")
    if SPEC.fullmatch(spec) and not path.exists():
        raise DeadweightError(
            f"{printable(spec)} is code, which this command does not take; expected a Hugging Face folder or hub id"
        )
    if ":" in spec and not path.exists():
        raise DeadweightError(
            f"{printable(spec)} does not exist, and a hub id has no colon; expected a path, a hub id, or "
            "package.module:callable with dots between packages"
        )
    if not path.is_file() and (path.suffix == ".json" or spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise DeadweightError(f"{printable(spec)} does not exist; expected a folder, a config.json or a .gguf file")
    return Location(spec, str(path) if path.is_file() else spec)


def refuse_code(spec: str) -> None:
    """Raise for the path of a Python file, with the name that would be understood."""
    match = CODE.fullmatch(spec)
    if match is not None:
        module = match["path"].replace("/", ".").lstrip(".")
        raise DeadweightError(
            f"{printable(spec)} is a file of Python code; expected package.module:callable, perhaps "
            f"{printable(module)}:{printable(match['name'] or 'build')}, in the folder from which it can be imported"
        )


def _gguf(spec: str, path: Path) -> Location:
    if not path.is_file():
        raise DeadweightError(f"{printable(spec)} does not exist; expected a .gguf file")
    if importlib.util.find_spec("gguf") is None:
        raise DeadweightError(f"{printable(spec)} needs the gguf package to be read; install it: pip install gguf")
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise DeadweightError(f"{printable(spec)} starts with {magic!r}; expected a GGUF file")
    return Location(spec, str(path.parent), gguf=path.name)


def read_config(location: Location, trust_remote_code: bool = False) -> Config:
    """The config, refused if transformers does not know its architecture."""
    root = Path(location.root)
    local = root if root.is_file() else root / "config.json" if location.folder else None
    if local is not None and location.gguf is None:
        _check_type(location, read_json(local), trust_remote_code)
    options = {"gguf_file": location.gguf} if location.gguf else {"trust_remote_code": trust_remote_code}
    try:
        with silenced(*HUB):
            config = AutoConfig.from_pretrained(location.root, **options)
    except Exception as error:  # the code that reads a config raises many kinds
        raise DeadweightError(_refusal(location, error)) from error
    _refuse_odd_depth(location, config)
    return config


def _refuse_odd_depth(location: Location, config: Config) -> None:
    """Raise for a number of layers that would take hours to build, or that is below zero."""
    for part in configs(config):
        for key, value in part.to_dict().items():
            if COUNT_OF_LAYERS.fullmatch(key) and isinstance(value, int) and not 0 <= value <= MOST_LAYERS:
                raise DeadweightError(
                    f"{printable(location.name)} has {printable(key)} = {value:,}; expected 0 to {MOST_LAYERS:,}"
                )


def _check_type(location: Location, raw: RawConfig, trust_remote_code: bool) -> None:
    kind = raw.get("model_type")
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if known or (raw.get("auto_map") and trust_remote_code):
        return
    if raw.get("auto_map"):
        raise DeadweightError(
            f"{printable(location.name)} brings its own code for model_type {printable(kind)}, which transformers "
            f"{transformers.__version__} does not know; to run that code, which you should read first, "
            "pass --trust-remote-code (trust_remote_code=True)"
        )
    raise DeadweightError(
        f"{printable(location.name)} has model_type {printable(kind)}; expected one that transformers "
        f"{transformers.__version__} knows: correct the config, or upgrade transformers"
    )


def _refusal(location: Location, error: Exception) -> str:
    name = printable(location.name)
    if location.gguf:
        return f"{name} cannot be read as a GGUF model that transformers knows ({reason(error)})"
    if location.folder or Path(location.root).is_file():
        return f"{name} holds a config that transformers rejects ({reason(error)})"
    return f"{name} is no local path, and could not be fetched as a hub id ({reason(error)}); {EXPECTED}"


def local_folder(spec: str) -> Path | None:
    """The folder that holds a model's files: a local one, or the hub's cache; None for other forms of a model."""
    path = Path(spec).expanduser()
    if spec == "demo" and not path.exists():
        return embedded.path()
    if path.is_dir():
        return path
    if path.exists() or ":" in spec or spec.startswith((".", "/", "~")) or path.suffix in (".gguf", ".json"):
        return None
    from huggingface_hub import snapshot_download

    try:
        with silenced(*HUB):
            return Path(snapshot_download(spec, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
    except Exception as error:  # the hub's client raises many kinds
        raise DeadweightError(
            f"{printable(spec)} is no local path, and could not be fetched as a hub id ({reason(error)}); {EXPECTED}"
        ) from error


def configs(config: Config) -> Iterator[Config]:
    """The config and every config nested in it."""
    yield config
    for key in getattr(config, "sub_configs", None) or ():
        if (inner := getattr(config, key, None)) is not None:
            yield from configs(inner)
