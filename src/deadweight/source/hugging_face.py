"""Hugging Face models: the module that a config describes, with or without its weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from deadweight.errors import DeadweightError
from deadweight.silence import silenced
from deadweight.slim.load import is_slim
from deadweight.source.checkpoint_files import check_weights
from deadweight.source.hugging_face_config import Location, configs, locate, read_config
from deadweight.source.model_classes import has_own_code, model_class, trusted_class
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import AutoClass, Config, ExampleInputs, Options, PreTrained, Setting
from deadweight.transformer import TransformerConfig

# With eager attention the tracer sees the softmax. Batched experts have no control flow that depends on the data.
READABLE = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
FALLBACKS: tuple[dict[str, str], ...] = (
    READABLE,
    {"attn_implementation": "eager"},
    {"experts_implementation": "batched_mm"},
    {},
)


@dataclass(frozen=True)
class LoadedNames:
    """Where a checkpoint and the model that its config describes differ."""

    missing: tuple[str, ...]  # parameters that the checkpoint lacks
    unread: tuple[str, ...]  # tensors of the checkpoint that the model has no place for


@dataclass(frozen=True)
class Built:
    """A module before it has example inputs."""

    name: str
    module: nn.Module
    config: Config | None
    notes: tuple[str, ...] = ()
    inputs: ExampleInputs = None
    missing: tuple[str, ...] = ()  # parameters that the checkpoint lacks: they are random
    quantised: bool = False  # the checkpoint is
    stored_dtype: torch.dtype | None = (
        None  # that the config names, where the module was built in float32 without weights
    )


def from_spec(spec: str, *, weights: bool, trust_remote_code: bool) -> Built:
    """The model of a folder, a hub id, a config.json or a .gguf file."""
    location = locate(spec)
    config = read_config(location, trust_remote_code)
    if location.folder is not None:
        check_weights(location.folder, needed=weights)
    if weights and location.gguf is None and Path(location.root).is_file():
        raise DeadweightError(f"{printable(spec)} is a config without weights; expected the folder that holds both")
    if weights:
        built = load(location, config, trust_remote_code)
    else:
        module, notes = build(config, trust_remote_code=trust_remote_code)
        dtype = named_dtype(config)
        built = Built(spec, module, module.config, notes, quantised=is_quantised(config), stored_dtype=dtype)
    return replace(built, notes=(*built.notes, *own_code_note(config)))


def own_code_note(config: Config) -> tuple[str, ...]:
    """A note if the config names code of its own, but transformers knows its type, so that this code is not run."""
    cls = model_class(config)
    if cls is None or is_slim(config) or isinstance(config, TransformerConfig) or trusted_class(config) is None:
        return ()
    return (
        f"the config names code of its own (auto_map), which was not run: opened as {cls.__name__} of transformers, "
        f"because it knows model_type {printable(getattr(config, 'model_type', '?'))}",
    )


def named_dtype(config: Config) -> torch.dtype | None:
    """The precision of the checkpoint, as its config names it."""
    named = getattr(config, "dtype", None)
    dtype = getattr(torch, named, None) if isinstance(named, str) else named
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def build(
    config: Config,
    *,
    cls: type[PreTrainedModel] | None = None,
    device: str = "meta",
    trust_remote_code: bool = False,
    **options: Setting,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that a config describes, in float32, without reading weights; the config itself does not change."""
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
            return _settle(module, device), notes + _note(readable)
    raise DeadweightError(
        f"a {printable(getattr(config, 'model_type', '?'))} model cannot be built from its config "
        f"({reason(refusals[0])}); expected a complete config"
    ) from refusals[0]


def _settle(module: nn.Module, device: str) -> nn.Module:
    """In eval mode, and all on one device, also tensors that a constructor created elsewhere."""
    stray = any(tensor.device.type != device for tensor in (*module.parameters(), *module.buffers()))
    return (module.to(device) if stray else module).eval()


def _construct(cls: type[PreTrainedModel] | None, config: Config, trust_remote_code: bool, options: dict) -> nn.Module:
    if cls is None:
        auto = (
            transformers.AutoModelForCausalLM
            if has_own_code(config, "AutoModelForCausalLM")
            else transformers.AutoModel
        )
        return auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32, **options)
    return cls._from_config(_own(cls, config), dtype=torch.float32, **options)


def _own(cls: type[PreTrainedModel], config: Config) -> Config:
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
            notes = ("the checkpoint is quantised; its parameters are counted as if they were not",)
    return plain, notes


def is_quantised(config: Config) -> bool:
    return any(getattr(inner, "quantization_config", None) is not None for inner in configs(config))


def _note(readable: dict[str, str]) -> tuple[str, ...]:
    missing = [key for key in READABLE if key not in readable]
    tried = [f"{key}={READABLE[key]!r}" for key in missing]
    return (f"the model does not accept {' and '.join(tried)}: its own choice is used",) if tried else ()


def eager(module: nn.Module) -> None:
    """Switch a live Hugging Face module to eager attention, batched experts and no cache."""
    for switch, choice in (("set_attn_implementation", "eager"), ("set_experts_implementation", "batched_mm")):
        try:
            with silenced("transformers.modeling_utils"):  # it logs that a model has its own attention
                getattr(module, switch, lambda choice: None)(choice)
        except (ValueError, AttributeError, KeyError, NotImplementedError):
            continue  # the model has its own implementation, which is traced as it is
    for inner in configs(module.config):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers: we have our own."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def load_weights(cls: AutoClass, root: str, options: Options) -> tuple[PreTrained, LoadedNames]:
    """The model with its weights, by from_pretrained; and the parameters that the checkpoint lacks."""
    given: Options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    with silenced("transformers"):  # it logs a table of these names
        model, info = cls.from_pretrained(root, **given)
    for name, stored, wanted in sorted(info.get("mismatched_keys") or ()):
        raise DeadweightError(
            f"{printable(name)} has shape {list(stored)} in the checkpoint; expected {list(wanted)}, as the config says"
        )
    return model, LoadedNames(*(tuple(sorted(info.get(key) or ())) for key in ("missing_keys", "unexpected_keys")))


def load(location: Location, config: Config, trust_remote_code: bool = False) -> Built:
    """The model with its weights in their own precision, from safetensors or GGUF, never from a pickle."""
    own = trusted_class(config) if trust_remote_code else None
    cls = model_class(config) or own or transformers.AutoModel
    options: Options = {"dtype": "auto"} | READABLE
    stored: Options = {"use_safetensors": True, "config": _cacheless(config)}
    options |= {"gguf_file": location.gguf} if location.gguf else stored
    options |= {"trust_remote_code": True} if trust_remote_code else {}
    try:
        with without_bars():
            module, names = load_weights(cls, location.root, options)
    except DeadweightError:
        raise
    except Exception as error:  # a stranger's files
        raise DeadweightError(
            f"the weights of {printable(location.name)} cannot be loaded ({reason(error)}); "
            "expected safetensors (or GGUF) that match the config"
        ) from error
    module.eval()
    eager(module)
    quantised = is_quantised(config)
    notes = _random(names.missing) + _unread(names.unread)
    return Built(location.name, module, module.config, notes, missing=names.missing, quantised=quantised)


def _cacheless(config: Config) -> Config:
    plain = copy.deepcopy(config)
    for inner in configs(plain):
        if hasattr(inner, "use_cache"):
            inner.use_cache = False
    return plain


def _random(missing: tuple[str, ...]) -> tuple[str, ...]:
    words = f"{len(missing)} parameters are not in the checkpoint and are random, first"
    return (f"{words} {printable(missing[0])}",) if missing else ()


def _unread(names: tuple[str, ...]) -> tuple[str, ...]:
    words = f"{len(names)} tensors of the checkpoint are not read by the model that its config describes, first"
    return (f"{words} {printable(names[0])}",) if names else ()
