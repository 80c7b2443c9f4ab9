"""Whether the cache of a model can be coded: tested by running the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall, observing
from deadweight.compress.streaming import device_of, float_of
from deadweight.compress.uncoded_tokens import UNCODED_TOKENS
from deadweight.errors import DeadweightError
from deadweight.slim.cache import CodedLayer
from deadweight.slim.coder import Coder
from deadweight.source.model import Source
from deadweight.source.printable import printable, reason

TOKENS = UNCODED_TOKENS + 4  # decoded one by one: some are read uncoded, some as codes
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)  # of a model's own code
APART = 0.05  # of the largest logit: a code that rounding moves by one changes logits far less


class Given:
    """The keys and values that every attention is given in one run."""

    knows_sinks = True

    def __init__(self) -> None:
        self.states: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        self.states.setdefault(path, (key.detach().clone(), value.detach().clone()))
        return call.attend(query, key, value)


@torch.no_grad()
def reads_own_caches(source: Source) -> bool:
    """Whether the cache holds exactly the keys and values of each attention; raises if two attentions share one."""
    given, name, owners = Given(), printable(source.name), dict[int, str]()
    args, kwargs = source.inputs.on(device_of(source.module), float_of(source.module))
    try:
        with observing(source.module, given):
            output = source.module(*args, **{**kwargs, "use_cache": True})
    except FAILURES as error:
        raise DeadweightError(f"{name} does not run with a cache ({reason(error)}); expected one to code") from error
    layers = list(getattr(getattr(output, "past_key_values", None), "layers", ()))
    for path, states in given.states.items():
        places = [i for i, layer in enumerate(layers) if holds(layer, states)]
        place = next((i for i in places if i not in owners), places[0] if places else None)  # zeros are all alike
        if place is None:
            return False
        if place in owners:
            raise DeadweightError(
                f"{name}: {path} reads the keys of {owners[place]}; expected keys of its own: caches that layers share "
                "cannot be coded"
            )
        owners[place] = path
    return True


def holds(layer: Any, states: tuple[Tensor, Tensor]) -> bool:
    """Whether a cache layer holds exactly these keys and values, or the last of them."""
    stored: tuple[Any, Any] = (getattr(layer, "keys", None), getattr(layer, "values", None))
    if hasattr(layer, "conv_states") or any(not isinstance(x, Tensor) for x in stored):
        return False
    pairs = [(x, y[:, :, -x.shape[2] :]) for x, y in zip(stored, states, strict=True) if x.ndim == y.ndim]
    same = [x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs]
    return len(same) == len(stored) and all(same)


def expect_same_decoded(original: Any, coded: Any, batch: Mapping[str, Tensor], name: str) -> None:
    """Raise if decoding with the coded cache gives other logits than the forward pass that was judged."""
    if not set(batch) <= {"input_ids", "attention_mask", "decoder_input_ids"}:
        return  # tokens alone would be another input
    ids, name = batch["input_ids"][:1, :TOKENS], printable(name)
    try:
        apart, past = decoded_apart(coded, ids)
    except FAILURES as error:
        raise DeadweightError(
            f"{name} does not decode with a coded cache ({reason(error)}): its cache cannot be coded"
        ) from error
    stored = sum(isinstance(layer, CodedLayer) for layer in layers_of(past))
    coders = sum(isinstance(part, Coder) for part in coded.modules())
    if stored != coders:
        raise DeadweightError(
            f"{name} has a cache of its own kind, in which {stored} of {coders} attentions are stored as codes; "
            "expected all of them: its cache cannot be coded"
        )
    if not apart <= APART and not apart <= 2 * decoded_apart(original, ids)[0]:  # some never decode to the same
        raise DeadweightError(
            f"{name} decodes with a coded cache to other logits than it was judged by ({apart:.1%} apart); expected "
            "the same: its cache cannot be coded"
        )


@torch.no_grad()
def decoded_apart(model: Any, ids: Tensor) -> tuple[float, Any]:
    """The largest difference between decoding and one forward pass, relative to the largest logit; and the cache."""
    crosses = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    named = (lambda x: {"input_ids": ids, "decoder_input_ids": x}) if crosses else (lambda x: {"input_ids": x})
    whole, past, steps = model(**named(ids), use_cache=False).logits, None, []
    for token in ids.split(1, 1):
        output = model(**named(token), use_cache=True, **({} if past is None else {"past_key_values": past}))
        past = getattr(output, "past_key_values", None)
        steps.append(output.logits)
    return float((torch.cat(steps, 1) - whole).abs().max() / whole.abs().max().clamp(min=1e-30)), past


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache, or of both caches behind an encoder."""
    parts = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    return [layer for part in (cache, *parts) for layer in getattr(part, "layers", ())]
