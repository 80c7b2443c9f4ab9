"""Keys that are cached before rotary positions and turned when they are read.

Before positions the keys of all joined heads are one real space, and any linear map of it will do: far fewer dimensions
are enough than for keys that are cached as they are used. The price: every step of decoding expands and turns all of
them. What is needed for it is how far one position turns each plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.compress.joined import as_complex
from deadweight.compress.judge import called
from deadweight.compress.rotary import rotary_settings, wrapped
from deadweight.errors import DeadweightError

CLOSE = 1e-3  # radians by which a position may be turned otherwise than at a constant rate

Planes = tuple[tuple[int, int], ...]


@torch.no_grad()
def told_positions(model: Any, batch: Mapping[str, Any], paths: Sequence[str]) -> set[str]:
    """The attentions that are called with the positions of their tokens: only they can turn keys later."""
    found: set[str] = set()

    def look(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if isinstance(kwargs.get("position_ids"), Tensor):
                found.add(path)

        return hook

    hooks = [model.get_submodule(p).register_forward_pre_hook(look(p), with_kwargs=True) for p in paths]
    try:
        called(model, {name: x[:1] if isinstance(x, Tensor) else x for name, x in batch.items()})
    finally:
        for hook in hooks:
            hook.remove()
    return found


def expect_steady(config: Any) -> None:
    """Refuse rotary positions whose rates depend on how long the text is: keys that are cached would need them all."""
    for rope in rotary_settings(config.to_dict()):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic" or (kind == "longrope" and rope.get("short_factor") != rope.get("long_factor")):
            raise DeadweightError(
                f"found {kind} rotary positions, whose rates change with the length of the text; expected constant "
                "ones (or leave out --late)"
            )


def turned_by(before: Tensor, after: Tensor, planes: Planes) -> tuple[Tensor, Tensor]:
    """Keys (b, g, t, d) before and after positions: Σ after · conj(before), and Σ |before|², each (t, P)."""
    a, b = as_complex(before, planes), as_complex(after, planes)
    return (b * a.conj()).sum((0, 1)), a.abs().pow(2).sum((0, 1))


def turned_back(gradient: Tensor, factor: Tensor, planes: Planes) -> Tensor:
    """Gradients with respect to turned keys, (…, t, m, d), as those with respect to keys before: times conj(factor)."""
    found = gradient.clone()
    z = as_complex(gradient, planes) * factor.conj()[:, None, :]
    for part, side in zip((z.real, z.imag), zip(*planes, strict=True), strict=True):
        found[..., list(side)] = part
    return found


def rates_of(turns: Tensor, sizes: Tensor, path: str) -> tuple[Tensor, float]:
    """Radians per position of every plane, and the factor that goes with turning, from sums by position, (t, P).

    A rate is below π, so that position 1 says it without doubt; each position as far again then makes it surer.
    """
    angles = turns.angle()
    rates = angles[1].clone() if len(angles) > 1 else angles[0]
    position = 2
    while position < len(angles):
        rates = rates + wrapped(angles[position] - rates * position) / position
        position *= 2
    at = torch.arange(len(angles), dtype=rates.dtype)[:, None]
    scale = float(turns.abs().sum() / sizes.sum().clamp(min=1e-300))
    if float(wrapped(angles - rates * at).abs().max()) > CLOSE:
        raise DeadweightError(
            f"{path} has positions that do not turn its keys at a constant rate; expected one (or leave out --late)"
        )
    return rates, scale
