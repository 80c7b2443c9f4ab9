"""Rotary positions of an attention: which dimensions form pairs, and by how many radians per position each rotates.

Keys are coded before RoPE. These angles need not be exact: encoding rotates keys back and decoding rotates them forward
by the same angles, so an error only makes keys harder to code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall, Watch, observing
from deadweight.compress.judge import run_model
from deadweight.compress.locate import Heads, Rows
from deadweight.errors import DeadweightError

Pairs = tuple[tuple[int, int], ...]
ALIKE = 1e-4  # of a rate, by which measured rates of two layers may differ and still be one
CLOSE = 1e-2  # radians by which a position may deviate from rotation at a constant rate


def as_complex(states: Tensor, pairs: Pairs) -> Tensor:
    """The pairs of dimensions of (…, d) as complex numbers, (…, pairs)."""
    first, second = (states[..., list(side)] for side in zip(*pairs, strict=True))
    return torch.complex(first, second)


def rotate(states: Tensor, angle: Tensor, pairs: Pairs) -> Tensor:
    """Heads (…, t, d) with every rotary pair rotated by its angle, (t, pairs)."""
    if not pairs:
        return states
    turned = as_complex(states, pairs) * torch.polar(torch.ones_like(angle), angle).to(states.device)
    result = states.clone()
    for part, side in zip((turned.real, turned.imag), zip(*pairs, strict=True), strict=True):
        result[..., list(side)] = part.to(states.dtype)
    return result


def expect_constant_rates(config: Any) -> None:
    """Raise if rotary frequencies depend on the sequence length: cached keys would have to change as it grows."""
    for rope in rotary_settings(config.to_dict()):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic" or (kind == "longrope" and rope.get("short_factor") != rope.get("long_factor")):
            raise DeadweightError(
                f"found {kind} rotary positions, whose rates change with the length of the text; expected constant "
                "rates: the cache of this model cannot be coded"
            )


def rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Every part of a config that names a kind of rotary positions."""
    if isinstance(config, dict):
        if "rope_type" in config or "short_factor" in config or config.get("type") in ("dynamic", "longrope"):
            yield config
        for part in config.values():
            yield from rotary_settings(part)


class QueryRun:
    """The queries of every attention in one forward pass, before and after RoPE."""

    knows_sinks = True

    def __init__(self, makers: Mapping[str, Rows]) -> None:
        self.makers = makers
        self.outputs: dict[str, Tensor] = {}
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        maker = self.makers.get(path)
        if maker is not None:
            output = self.outputs[maker.module]
            output = output.transpose(1, 2).flatten(2) if output.shape == query.shape else output
            output = output.reshape(query.shape[0], query.shape[2], -1)
            places = maker.places
            before = output[..., places.flatten()].unflatten(-1, places.shape) * maker.factor.to(output)
            self.pairs[path] = (before.transpose(1, 2).double().cpu(), query.double().cpu())
        return call.attend(query, key, value)


@torch.no_grad()
def measure_rates(
    model: Any, attentions: Sequence[Heads], batch: Mapping[str, Tensor], watch: Watch = observing
) -> dict[str, Tensor]:
    """Radians per position of every rotary pair, by the path of the attention."""
    makers = {h.path: h.query_maker for h in attentions if h.rotary_pairs and h.query_maker is not None}
    run = QueryRun(makers)
    with ExitStack() as stack:
        stack.enter_context(watch(model, run))
        for name in {maker.module for maker in makers.values()}:
            hook = model.get_submodule(name).register_forward_hook(
                lambda m, a, out, name=name: run.outputs.__setitem__(name, out)
            )
            stack.callback(hook.remove)
        run_model(model, {n: x[:1] if isinstance(x, Tensor) else x for n, x in batch.items()}, words=False)
    rates = {h.path: rates_of(*run.pairs[h.path], h) for h in attentions if h.path in run.pairs}
    return {path: first_alike(own, list(rates.values())) for path, own in rates.items()}


def first_alike(rates: Tensor, known: Sequence[Tensor]) -> Tensor:
    """The first of the known rates that equal these up to rounding, so that such layers share one table."""
    return next(r for r in known if r.shape == rates.shape and torch.allclose(r, rates, rtol=ALIKE, atol=ALIKE**2))


def rates_of(before: Tensor, after: Tensor, heads: Heads) -> Tensor:
    """From heads (b, h, t, d) at positions 0, 1, …: a rate is below π, so position 1 tells it without doubt, and each
    position as far again makes it more exact."""
    a, b = as_complex(before, heads.rotary_pairs), as_complex(after, heads.rotary_pairs)
    angles = (b * a.conj()).sum((0, 1)).angle()
    rates = angles[1].clone() if len(angles) > 1 else angles[0]
    position = 2
    while position < len(angles):
        rates = rates + wrap_angles(angles[position] - rates * position) / position
        position *= 2
    at = torch.arange(len(angles), dtype=rates.dtype)[:, None]
    if float(wrap_angles(angles - rates * at).abs().max()) > CLOSE:
        raise DeadweightError(
            f"{heads.path} does not rotate its keys at a constant rate per position; expected RoPE with constant "
            "frequencies: its cache cannot be coded"
        )
    return rates


def wrap_angles(angle: Tensor) -> Tensor:
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
