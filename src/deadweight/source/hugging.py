"""Hugging Face models: their config, the class it names, and the module, with or without its weights."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.silence import silenced
from deadweight.slim.load import is_slim, slim_class
from deadweight.source.files import check_weights, read_json
from deadweight.source.kinds import Config, ExampleInputs, Options, RawConfig, Setting
from deadweight.source.private import model_classes
from deadweight.source.text import printable, reason
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

OWN = {cls.__name__: cls for cls in (TransformerModel, TransformerForCausalLM, TransformerForMaskedLM)}
# Eager attention shows its softmax to the tracer. Batched experts have no control flow that depends on the data.
READABLE = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
FALLBACKS: tuple[dict[str, str], ...] = (
    READABLE,
    {"attn_implementation": "eager"},
    {"experts_implementation": "batched_mm"},
    {},
)
ADAPTER = "adapter_config.json"
MERGE = "expected weights that it is merged into (peft: model.merge_and_unload(), then save_pretrained)"
QUANTISED = "the checkpoint is quantised; its parameters are counted as if they were not"
DECODER = (transformers.AutoModelForCausalLM, transformers.AutoModel)
ENCODER = (transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM, transformers.AutoModel)
BOTH = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModel)
HUB = ("huggingface_hub", "huggingface_hub.utils._http")  # its client logs every retry


@dataclass(frozen=True)
class Built:
    """A module as it came, before its example inputs."""

    name: str
    module: nn.Module
    config: Config | None
    notes: tuple[str, ...] = ()
    inputs: ExampleInputs = None
    missing: tuple[str, ...] = ()  # parameters that the checkpoint does not hold: they are random


@dataclass(frozen=True)
class Place:
    """Where a config and its weights lie: a folder, a hub id, or a file."""

    name: str  # what the user gave
    root: str  # what from_pretrained is given
    gguf: str | None = None  # the file's name inside root
    folder: Path | None = None  # root, where it is a folder here and may hold weights


def from_spec(spec: str, *, weights: bool, trust_remote_code: bool) -> Built:
    """The model of a folder, a hub id, a config.json or a .gguf file."""
    place = locate(spec)
    config = read_config(place, trust_remote_code)
    if place.folder is not None:
        check_weights(place.folder, needed=weights)
    if weights and place.gguf is None and Path(place.root).is_file():
        raise DeadweightError(f"{printable(spec)} is a config without weights; expected the folder that holds both")
    if weights:
        return load(place, config, trust_remote_code)
    module, notes = build(config, trust_remote_code=trust_remote_code)
    return Built(spec, module, module.config, notes)


def locate(spec: str) -> Place:
    """Which of its forms a spec has."""
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        return _gguf(spec, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / ADAPTER).is_file():
                raise DeadweightError(f"{printable(spec)} is an adapter, not a model; {MERGE}")
            raise DeadweightError(f"{printable(spec)} is a folder without config.json; expected a Hugging Face folder")
        return Place(spec, str(path), folder=path)
    if path.is_file() and path.suffix.lower() != ".json":
        raise DeadweightError(
            f"{printable(spec)} is a {path.suffix or 'plain'} file; expected config.json or a .gguf, or the folder "
            "that holds weights and config"
        )
    if not path.is_file() and (path.suffix == ".json" or spec.startswith((".", "/", "~")) or spec.count("/") > 1):
        raise DeadweightError(f"{printable(spec)} does not exist; expected a folder, a config.json or a .gguf file")
    return Place(spec, str(path) if path.is_file() else spec)


def _gguf(spec: str, path: Path) -> Place:
    if not path.is_file():
        raise DeadweightError(f"{printable(spec)} does not exist; expected a .gguf file")
    if importlib.util.find_spec("gguf") is None:
        raise DeadweightError(f"{printable(spec)} needs the gguf package to be read; install it: pip install gguf")
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise DeadweightError(f"{printable(spec)} starts with {magic!r}; expected a GGUF file")
    return Place(spec, str(path.parent), gguf=path.name)


def read_config(place: Place, trust_remote_code: bool = False) -> Config:
    """The config, checked to name an architecture that transformers knows."""
    root = Path(place.root)
    local = root if root.is_file() else root / "config.json" if place.folder else None
    if local is not None and place.gguf is None:
        _check_type(place, read_json(local), trust_remote_code)
    options = {"gguf_file": place.gguf} if place.gguf else {"trust_remote_code": trust_remote_code}
    try:
        with silenced(*HUB):
            return AutoConfig.from_pretrained(place.root, **options)
    except Exception as error:  # a stranger's config, read by code that raises whatever it likes
        raise DeadweightError(_refusal(place, error)) from error


def _check_type(place: Place, raw: RawConfig, trust_remote_code: bool) -> None:
    kind = raw.get("model_type")
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if known or (raw.get("auto_map") and trust_remote_code):
        return
    if raw.get("auto_map"):
        raise DeadweightError(
            f"{printable(place.name)} brings its own code for model_type {printable(kind)}, which transformers "
            f"{transformers.__version__} does not know; to run that code, which you should read first, "
            "pass --trust-remote-code (trust_remote_code=True)"
        )
    raise DeadweightError(
        f"{printable(place.name)} has model_type {printable(kind)}; expected one that transformers "
        f"{transformers.__version__} knows: correct the config, or upgrade transformers"
    )


def _refusal(place: Place, error: Exception) -> str:
    name = printable(place.name)
    if place.gguf:
        return f"{name} cannot be read as a GGUF model that transformers knows ({reason(error)})"
    if place.folder or Path(place.root).is_file():
        return f"{name} holds a config that transformers refuses ({reason(error)})"
    return (
        f"{name} is no local path, and as a hub id it could not be fetched ({reason(error)}); "
        "expected a folder, a config.json, a .gguf file, a hub id, or package.module:callable"
    )


def local_folder(spec: str) -> Path | None:
    """The folder that holds a model's files: itself, or where the hub's client has put them; None for other forms."""
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
        raise DeadweightError(f"{printable(spec)} could not be fetched from the hub ({reason(error)})") from error


def model_class(config: Config) -> type[PreTrainedModel] | None:
    """The class that the config names, or else the one that transformers keeps for its type."""
    for name in getattr(config, "architectures", None) or ():
        known = _named(config, name.removeprefix("Slim")) if isinstance(name, str) else None
        if isinstance(known, type) and issubclass(known, PreTrainedModel):
            return _slim_or_not(known, config)
    for auto in _autos(config):
        if type(config) in model_classes(auto):
            known = model_classes(auto)[type(config)]
            return _slim_or_not(known[0] if isinstance(known, (tuple, list)) else known, config)
    return None


def trusted_class(config: Config) -> Any:
    """The Auto class that finds a model in the code of its own folder."""
    return next((auto for auto in _autos(config) if _remote(config, auto.__name__)), None)


def _named(config: Config, name: str) -> Any:
    """A class of transformers; of our own transformer always ours, whatever code lies beside the weights."""
    return OWN.get(name) if isinstance(config, TransformerConfig) else getattr(transformers, name, None)


def _slim_or_not(cls: type[PreTrainedModel], config: Config) -> type[PreTrainedModel]:
    """A slim checkpoint of ours has the same class with smaller layers."""
    return slim_class(cls) if is_slim(config) else cls


def _autos(config: Config) -> tuple[Any, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return BOTH
    masked = type(config) in model_classes(transformers.AutoModelForMaskedLM)
    decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return ENCODER if masked and not decoder else DECODER


def configs(config: Config) -> Iterator[Config]:
    """The config and every config nested in it."""
    yield config
    for key in getattr(config, "sub_configs", None) or ():
        if (inner := getattr(config, key, None)) is not None:
            yield from configs(inner)


def build(
    config: Config,
    *,
    cls: type[PreTrainedModel] | None = None,
    device: str = "meta",
    trust_remote_code: bool = False,
    **options: Setting,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that a config describes, in float32 with no weights read; the config itself is left alone."""
    plain, notes = _plain(config)
    cls = cls or model_class(plain)
    refusals: list[Exception] = []
    for readable in FALLBACKS:
        try:
            with torch.device(device):
                module = _construct(cls, copy.deepcopy(plain), trust_remote_code, readable | options)
        except Exception as error:  # noqa: BLE001 - the model's own code
            refusals.append(error)
        else:
            return _settled(module, device), notes + _note(readable)
    raise DeadweightError(
        f"a {printable(getattr(config, 'model_type', '?'))} model cannot be built from its config "
        f"({reason(refusals[0])}); expected a complete config"
    ) from refusals[0]


def _settled(module: nn.Module, device: str) -> nn.Module:
    """All on one device, also what a constructor made without asking for the device; not training."""
    stray = any(tensor.device.type != device for tensor in (*module.parameters(), *module.buffers()))
    return (module.to(device) if stray else module).eval()


def _construct(cls: type[PreTrainedModel] | None, config: Config, trust_remote_code: bool, options: dict) -> nn.Module:
    if cls is None:
        auto = transformers.AutoModelForCausalLM if _remote(config, "AutoModelForCausalLM") else transformers.AutoModel
        return auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32, **options)
    return cls._from_config(_own(cls, config), dtype=torch.float32, **options)


def _remote(config: Config, auto: str) -> bool:
    return auto in (getattr(config, "auto_map", None) or {})


def _own(cls: type[PreTrainedModel], config: Config) -> Any:
    """The part of a composite config that the class is made for."""
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        for inner in configs(config):
            if isinstance(inner, cls.config_class):
                return inner
    return config


def _plain(config: Config) -> tuple[Config, tuple[str, ...]]:
    """A copy without cache and without quantisation."""
    plain, notes = copy.deepcopy(config), tuple[str, ...]()
    for inner in configs(plain):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False
        if getattr(inner, "quantization_config", None) is not None:
            del inner.quantization_config
            notes = (QUANTISED,)
    return plain, notes


def _note(readable: dict[str, str]) -> tuple[str, ...]:
    missing = [key for key in READABLE if key not in readable]
    return (f"the model refuses {' and '.join(missing)} as we set it",) if missing else ()


def eager(module: nn.Module) -> None:
    """Switch a live Hugging Face module to eager attention, batched experts and no cache."""
    for switch, choice in (("set_attn_implementation", "eager"), ("set_experts_implementation", "batched_mm")):
        try:
            with silenced("transformers.modeling_utils"):  # it says so where the model's attention is its own
                getattr(module, switch, lambda choice: None)(choice)
        except (ValueError, AttributeError, KeyError, NotImplementedError):
            continue  # the model has its own; the tracer will see what it is
    for inner in configs(module.config):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws a bar for every load; ours says what goes on."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def load(place: Place, config: Config, trust_remote_code: bool = False) -> Built:
    """The model with its weights in their own precision, from safetensors or GGUF, never from a pickle."""
    cls = model_class(config) or transformers.AutoModel
    options: Options = {"dtype": "auto"} | READABLE
    options |= {"gguf_file": place.gguf} if place.gguf else {"use_safetensors": True, "config": _cacheless(config)}
    options |= {"trust_remote_code": True} if trust_remote_code else {}
    try:
        with without_bars():
            module, info = cls.from_pretrained(place.root, output_loading_info=True, **options)
    except Exception as error:  # a stranger's files
        raise DeadweightError(
            f"the weights of {printable(place.name)} cannot be loaded ({reason(error)}); "
            "expected safetensors (or GGUF) that match the config"
        ) from error
    module.eval()
    eager(module)
    missing = tuple(sorted(info.get("missing_keys") or ()))
    return Built(place.name, module, module.config, _random(missing), missing=missing)


def _cacheless(config: Config) -> Config:
    plain = copy.deepcopy(config)
    for inner in configs(plain):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False
    return plain


def _random(missing: tuple[str, ...]) -> tuple[str, ...]:
    words = f"{len(missing)} parameters are not in the checkpoint and are random, first"
    return (f"{words} {printable(missing[0])}",) if missing else ()
