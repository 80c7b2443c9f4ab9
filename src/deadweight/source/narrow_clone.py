"""A narrow clone: the same architecture with random parameters, small enough to count its redundant dimensions."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.example_makers import setting
from deadweight.source.examples import (
    LENGTH,
    POSITIONS,
    candidates,
    depends_on_data,
    example_inputs,
    first_that_runs,
)
from deadweight.source.hugging_face import build
from deadweight.source.inputs import Inputs
from deadweight.source.model import Source
from deadweight.source.narrow_config import shallow, shrink
from deadweight.source.narrow_sizes import AFFORDABLE, LARGEST, LONGEST, PARTLY, SIZES, SMALL, Size
from deadweight.source.narrow_trials import loosen
from deadweight.source.printable import printable, reason
from deadweight.source.randomise import randomise
from deadweight.source.type_aliases import Config, RawConfig


def narrow(source: Source, *, seed: int = 0, hidden: int | None = None, vocabulary: int | None = None) -> Source:
    """A clone on the CPU, as narrow as the architecture allows, that has run once; in float64 if its code can.

    Widths 8, 16, 32 and 64 are tried in turn; `hidden` sets one. Where none of them runs, single settings keep their
    own value. A model of up to 20,000 parameters is cloned as it is. `vocabulary` is the number of tokens (default: 11,
    or the model's own if it is small): a first layer that reads single tokens sees as many points as there are tokens.
    """
    n_parameters = sum(p.numel() for p in source.module.parameters())
    if n_parameters <= SMALL and (source.has_weights or source.config is not None) and hidden is None:
        return _as_it_is(source, seed) if vocabulary is None else _with_words(source, seed, vocabulary)
    if source.config is None:
        raise DeadweightError(
            f"{printable(source.name)} has {n_parameters} parameters and no config from which to build a narrow clone; "
            f"expected at most {SMALL} parameters: build it smaller"
        )
    refusals: list[str] = []
    for size in SIZES if hidden is None else (Size(hidden), Size(hidden, spare=2)):
        try:
            size = size if vocabulary is None else replace(size, vocabulary=vocabulary)
            return _clone(source, narrow_config(source.config, size), seed, size.length)
        except Exception as error:  # noqa: BLE001 - a config that the model's own code refuses
            refusals.append(reason(error))
    if hidden is None:
        try:
            return _partly_narrow(source, seed)
        except Exception as error:  # noqa: BLE001 - as before
            refusals.append(reason(error))
    raise DeadweightError(
        f"no narrow clone of {printable(source.name)} runs: width {hidden or 8} fails with {refusals[0]}; "
        f"the last attempt fails with {refusals[-1]}"
    )


def _partly_narrow(source: Source, seed: int) -> Source:
    config = partly_narrow_config(source)
    module, _ = build(config, cls=type(source.module), **_options(source.module))
    if (n_parameters := sum(p.numel() for p in module.parameters())) > LARGEST:
        raise DeadweightError(
            f"the narrowest clone that runs has {n_parameters} parameters; expected at most {LARGEST}"
        )
    return _clone(source, config, seed, None)


def narrow_config(config: Config, size: Size) -> Config:
    """The narrow config of the same class."""
    return _remade(config, shrink(config.to_dict(), size))


def partly_narrow_config(source: Source) -> Config:
    """The config with every setting narrow with which the model still runs; the others keep their values."""
    assert source.config is not None, "a model without a config has no narrow one"
    config = source.config.to_dict()
    bases = (shallow(config, Size()), shallow(config, Size(repeat=2)), config)
    kept = next((base for base in bases if _runs(source, base)), None)
    if kept is None:
        raise DeadweightError("the model does not run at its own width either")
    for size in PARTLY:
        kept = loosen(kept, _smaller(kept, shrink(config, size)), lambda values: _runs(source, values))
    return _remade(source.config, kept)


def _smaller(kept: RawConfig, other: RawConfig) -> RawConfig:
    """The other config, without values that are larger than the present ones."""
    out = dict(other)
    for name, old in kept.items():
        new = other.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            out[name] = _smaller(old, new)
        elif isinstance(old, (int, float)) and isinstance(new, (int, float)) and new > old:
            out[name] = old
    return out


def _runs(source: Source, values: RawConfig) -> bool:
    """Whether the model runs with this config: with values if it is small, else on fake tensors."""
    names = tuple(name for name, value in source.inputs.kwargs.items() if isinstance(value, torch.Tensor))
    try:
        config = _remade(source.config, dict(values))
        module, _ = build(config, cls=type(source.module), **_options(source.module))
        small = sum(p.numel() for p in module.parameters()) <= AFFORDABLE
        if small:
            module, _ = build(config, cls=type(source.module), device="cpu", **_options(source.module))
        _, error = first_that_runs(module, candidates(module, module.config, only=names))
    except Exception:  # noqa: BLE001 - a config that the model's own code refuses
        return False
    return error is None or (not small and depends_on_data(error))


def shallow_config(config: Config, repeat: int = 1) -> Config:
    """The config with its own widths and as few layers as show every kind, each kind `repeat` times."""
    return _remade(config, shallow(config.to_dict(), Size(repeat=repeat)))


def _remade(config: Config, values: RawConfig) -> Config:
    values.pop("quantization_config", None)
    return type(config).from_dict(values)


def _as_it_is(source: Source, seed: int) -> Source:
    if source.config is not None and not source.has_weights:
        return _clone_at_full_length(source, seed)
    module = randomise(source.module, seed)
    inputs, error = first_that_runs(module, [source.inputs.cast(torch.float64)])
    if error is not None:
        module = module.to(torch.float32)
        inputs, error = first_that_runs(module, [source.inputs.cast(torch.float32)])
    if error is not None:
        raise DeadweightError(
            f"{printable(source.name)} does not run on its example inputs ({reason(error)}); expected inputs that its "
            "forward takes"
        ) from error
    assert inputs is not None
    return _source(source, module, inputs, "the model itself, with random parameters")


def _with_words(source: Source, seed: int, vocabulary: int) -> Source:
    """The same small model with a larger vocabulary, if its config has a setting for it."""
    values = source.config.to_dict() if source.config is not None else {}
    old = values.get("vocab_size")
    if not isinstance(old, int) or old >= vocabulary:
        return _as_it_is(source, seed)
    wider = replace(source, config=_remade(source.config, values | {"vocab_size": vocabulary}))
    return _clone_at_full_length(wider, seed)


def _clone_at_full_length(source: Source, seed: int) -> Source:
    """At the greatest length that runs: some families reserve positions for padding."""
    positions = setting(source.config, *POSITIONS, default=LENGTH)
    longest = positions if isinstance(positions, int) and 0 < positions <= LONGEST else LENGTH
    for length in range(longest, 1, -1):
        try:
            return _clone(source, source.config, seed, length)
        except DeadweightError:
            continue  # one shorter
    return _clone(source, source.config, seed, 1)


def _clone(source: Source, config: Config, seed: int, length: int | None) -> Source:
    module, _ = build(config, cls=type(source.module), device="cpu", **_options(source.module))
    module = randomise(module, seed).train(source.module.training)
    inputs, refusal = example_inputs(module, module.config, length)
    if refusal is not None:  # some code puts the smallest float64 into a float32 mask
        module = module.to(torch.float32)
        inputs, refusal = example_inputs(module, module.config, length)
    if refusal is not None:
        raise DeadweightError(refusal)
    n_parameters = sum(p.numel() for p in module.parameters())
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    return _source(source, module, inputs.cast(dtype), f"a narrow clone of {n_parameters:,} parameters")


def _options(module: nn.Module) -> RawConfig:
    """Choices that are not in the config and that the clone must repeat: a model without a pooler has none."""
    asks = "add_pooling_layer" in inspect.signature(type(module).__init__).parameters
    return {"add_pooling_layer": getattr(module, "pooler", None) is not None} if asks else {}


def _source(source: Source, module: nn.Module, inputs: Inputs, what: str) -> Source:
    return Source(
        name=source.name,
        module=module,
        kwargs=inputs.kwargs,
        args=inputs.args,
        has_weights=True,
        config=getattr(module, "config", None) if source.config is not None else None,
        notes=(what,),
        inputs=inputs,
    )
