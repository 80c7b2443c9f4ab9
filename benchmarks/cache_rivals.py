"""Other ways to make a cache smaller, as their papers describe them: what comes back of keys and values, and the bytes.

All of them are given keys and values of every token, (b, g, t, d), and give back what their cache would: `Rival.apply`.
`bits` is per number of the cache, everything that they store beside the codes included. None of this is their authors'
code; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall
from deadweight.compress.cache_moments import CacheMoments
from deadweight.compress.rotary_layout import rotate

BLOCK = 32  # numbers, or tokens, that share a scale
FIRST = 4  # tokens of a sequence that our cache does not code


@dataclass
class Rival:
    """A method at one size: what it makes of the keys and values of an attention."""

    name: str
    bits: float  # per number, everything included
    apply: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
    source: str  # where it is described
    told: dict[str, Any] = field(default_factory=dict)

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        return call.attend(query, *self.apply(path, key, value))


def symmetric(x: Tensor, bits: int) -> Tensor:
    """Blocks of 32 numbers along the last axis with a 16-bit scale: q8_0 and, as in llama.cpp, q4_0."""
    shape = x.shape
    x = x.reshape(*shape[:-1], -1, min(BLOCK, shape[-1]))
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    top = 2 ** (bits - 1)
    scale = (x.abs().amax(-1, keepdim=True) / (top - 1) if bits == 8 else extreme / -top).half().float()
    codes = (x / torch.where(scale == 0, torch.ones_like(scale), scale)).round().clamp(-top, top - 1)
    return (codes * scale).reshape(shape)


def affine(x: Tensor, bits: int, axis: int) -> Tensor:
    """Smallest and largest value along an axis, in 16 bits, and steps between them."""
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12).half().float()
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low.half().float()


@cache
def lloyd_max(bits: int) -> tuple[Tensor, float]:
    """The levels with the least squared error for a normal variable of unit variance, and that error."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    levels = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    ends = torch.tensor([torch.inf], dtype=torch.float64)
    for _ in range(4000):
        edges = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        mass, density = normal.cdf(edges).diff(), normal.log_prob(edges).exp()
        levels = -density.diff() / mass  # the mean of each cell
    return levels, float(1 - (mass * levels.square()).sum())


def reach(bits: int) -> float:
    """The largest value that is not clipped; with one bit nothing is."""
    levels = lloyd_max(bits)[0]
    return float("inf") if bits == 1 else float(levels[-1] + (levels[-1] - levels[-2]) / 2)


def nearest(z: Tensor, bits: int) -> Tensor:
    """The nearest of the levels that are best for a normal variable."""
    levels = lloyd_max(bits)[0].to(z)
    return levels[torch.bucketize(z.contiguous(), (levels[1:] + levels[:-1]) / 2)]


def best_widths(weights: Tensor, bits: float) -> Tensor:
    """Widths from 0 to 8 of groups of these weights, with the least error for so many bits on average.

    Each bit saves less than the one before it, so the best are the bits that save most.
    """
    errors = torch.tensor([1.0, *(lloyd_max(width)[1] for width in range(1, 9))], dtype=torch.float64)
    saved = (weights[:, None] * (errors[:-1] - errors[1:])).flatten()
    taken = torch.zeros_like(saved)
    taken[saved.argsort(descending=True, stable=True)[: int(bits * len(weights))]] = 1
    return taken.view(len(weights), -1).sum(1).long()


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if len(matrix) != size:
        raise ValueError(f"found heads of {size} dimensions; a Hadamard rotation takes a power of two")
    return matrix / size**0.5


def blocks(bits: int) -> Rival:
    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return symmetric(key, bits), symmetric(value, bits)

    return Rival(f"{bits} bits in blocks of 32", bits + 16 / BLOCK, apply, "ggml's q8_0 and q4_0")


def rotated_blocks(bits: int) -> Rival:
    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        turns = [hadamard(x.shape[-1]).to(x) for x in (key, value)]
        return tuple(symmetric(x @ h, bits) @ h.T for x, h in zip((key, value), turns, strict=True))  # type: ignore[return-value]

    return Rival(
        f"{bits} bits in blocks behind a Hadamard rotation", bits + 16 / BLOCK, apply, "as llama.cpp rotates its cache"
    )


def kivi(bits: int) -> Rival:
    """Keys by channel over 32 tokens, values by token over 32 numbers; the latest 32 tokens are not counted in."""

    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        tokens = key.shape[2] // BLOCK * BLOCK
        whole = key[:, :, :tokens].unflatten(2, (-1, BLOCK))
        coded = torch.cat([affine(whole, bits, 3).flatten(2, 3), key[:, :, tokens:]], 2)
        parts = value.unflatten(-1, (-1, min(BLOCK, value.shape[-1])))
        return coded, affine(parts, bits, -1).flatten(-2)

    return Rival(
        f"KIVI, {bits} bits", bits + 32 / BLOCK, apply, "arXiv 2402.02750, without its window of latest tokens"
    )


def turboquant(bits: int) -> Rival:
    """A random rotation, the norm in 16 bits, and the best levels of a normal variable."""

    def coded(x: Tensor) -> Tensor:
        size = x.shape[-1]
        generator = torch.Generator().manual_seed(size)
        turn = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q.to(x)
        norm = x.norm(dim=-1, keepdim=True).half().float().clamp(min=1e-12)
        z = (x / norm) @ turn * size**0.5
        return (nearest(z, bits) / size**0.5) @ turn.T * norm

    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return coded(key), coded(value)

    return Rival(f"TurboQuant, {bits} bits", bits + 16 / 64, apply, "arXiv 2504.19874, its variant for squared error")


def principal(bits: float, known: dict[str, CacheMoments]) -> Rival:
    """Principal components of all heads before rotary positions, widths by dynamic programming, no gradients.

    The scale of a token and the first tokens are treated as in our cache: the basis and the widths are what differs.
    """
    paths = list(known)
    sides = [(path, side) for path in paths for side in ("keys", "values")]
    spectra = {}
    for path in paths:
        own = known[path].measured().sets[0]
        for side, at in (("keys", slice(own.keys)), ("values", slice(own.keys, None))):
            variance, vectors = torch.linalg.eigh(own.covariance[at, at])
            spectra[path, side] = (own.mean[at], variance.flip(0).clamp(min=0), vectors.flip(1))
    relative = {s: spectra[s][1] / spectra[s][1].sum() for s in sides}  # every layer and side counts alike
    widths = best_widths(torch.cat([r.view(-1, 8).sum(1) for r in relative.values()]).double(), bits)
    by_side = dict(zip(sides, widths.split([len(spectra[s][1]) // 8 for s in sides]), strict=True))

    def coded(path: str, side: str, x: Tensor) -> Tensor:
        mean, variance, vectors = (t.to(x) for t in spectra[path, side])
        beside = x.transpose(1, 2).flatten(2)
        spread = variance.clamp(min=1e-12).sqrt()
        z = (beside - mean) @ vectors / spread
        each = by_side[path, side].repeat_interleave(8)
        limits = torch.tensor([reach(int(w)) if w else float("inf") for w in each]).to(z)
        scale = (z.abs() / limits).amax(-1, keepdim=True).clamp(min=1)  # grows where something would be clipped
        out = torch.zeros_like(z)
        for width in set(each.tolist()) - {0}:
            at = each == width
            out[..., at] = nearest(z[..., at] / scale, width) * scale
        return ((out * spread) @ vectors.T + mean).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)

    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        moments = known[path]
        keys = turned(moments, coded(path, "keys", unturned(moments, key)))
        return first_kept(key, keys), first_kept(value, coded(path, "values", value))

    return Rival(
        f"principal components, {bits:g} bits", bits + 0.06, apply, "KVTC, arXiv 2511.01815, no entropy coding"
    )


@dataclass
class Samples:
    """Keys before rotary positions and values that an attention has cached on the calibration text, (tokens, g · d)."""

    moments: CacheMoments
    sensitivity: Tensor | None = None  # mean squared gradient of every number of the keys
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def observe(self, call: AttentionCall) -> Tensor:
        beside = (self.moments.unrotate(call.key), call.value)
        key, value = (x[:, :, FIRST:].transpose(1, 2).flatten(2).flatten(0, 1) for x in beside)
        self.kept.append((key.float(), value.float()))
        return call.attend(call.query, call.key, call.value)

    @property
    def keys(self) -> Tensor:
        return torch.cat([key for key, _ in self.kept])

    @property
    def values(self) -> Tensor:
        return torch.cat([value for _, value in self.kept])


def fitted_levels(x: Tensor, weights: Tensor, bits: int, most: int = 200_000) -> Tensor:
    """The levels with the least weighted squared error for these numbers: k-means in one dimension."""
    x, weights = x.flatten(), weights.expand_as(x).flatten()
    at = torch.linspace(0, len(x) - 1, min(most, len(x)), device=x.device).long()
    x, weights = x[at].double(), weights[at].double()
    levels = torch.quantile(x, (torch.arange(2**bits, dtype=x.dtype, device=x.device) + 0.5) / 2**bits)
    for _ in range(100):
        cell = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add_(0, cell, weights)
        sums = torch.zeros_like(levels).index_add_(0, cell, weights * x)
        levels = torch.where(mass > 0, sums / mass.clamp(min=1e-300), levels).sort().values
    return levels.float()


def to_levels(x: Tensor, levels: Tensor) -> Tensor:
    return levels[torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)]


def kvquant(bits: int, known: dict[str, CacheMoments], samples: dict[str, Samples]) -> Rival:
    """Keys by channel before rotary positions, ranges from the calibration text; values by token; levels fitted.

    Levels of keys are weighted by the gradients of their channel. The sparse part is left out. The first tokens are as
    in our cache.
    """
    ranges, levels = {}, {}
    for path, own in samples.items():
        keys, values = own.keys, own.values
        low, high = keys.amin(0), keys.amax(0)
        middle, half = (low + high) / 2, ((high - low) / 2).clamp(min=1e-12)
        assert own.sensitivity is not None
        weights = own.sensitivity.to(half) * half.square()
        ranges[path] = middle, half
        levels[path] = (
            fitted_levels((keys - middle) / half, weights, bits),
            fitted_levels(spread(values)[0], torch.ones((), device=values.device), bits),
        )

    def apply(path: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        moments, (middle, half), (key_levels, value_levels) = known[path], ranges[path], levels[path]
        beside = unturned(moments, key).transpose(1, 2)
        coded = to_levels((beside.flatten(2).float() - middle) / half, key_levels) * half + middle
        keys = turned(moments, coded.to(key.dtype).view_as(beside).transpose(1, 2))
        flat = value.transpose(1, 2)
        unit, centre, scale = spread(flat.flatten(2).float())
        values = (to_levels(unit, value_levels) * scale + centre).to(value.dtype).view_as(flat).transpose(1, 2)
        return first_kept(key, keys), first_kept(value, values)

    some = next(iter(known.values())).heads
    more = 32 / (some.key_heads * some.d_v) / 2  # a range of each token, for the values
    source = "arXiv 2401.18079, without its sparse part"
    return Rival(f"KVQuant, {bits} bits", bits + more + 0.06, apply, source)


def spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every token between −1 and 1, its middle and half of its range."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    centre, scale = (low + high) / 2, ((high - low) / 2).clamp(min=1e-12)
    return (x - centre) / scale, centre, scale


def unturned(moments: CacheMoments, key: Tensor) -> Tensor:
    return moments.unrotate(key)


def turned(moments: CacheMoments, key: Tensor) -> Tensor:
    if moments.rates is None:
        return key
    positions = torch.arange(key.shape[2], dtype=torch.float64)[:, None]
    return rotate(key, (positions * moments.rates).to(key.device, torch.float32), moments.heads.rotary_pairs)


def first_kept(exact: Tensor, coded: Tensor, first: int = FIRST) -> Tensor:
    """The first tokens as they are: what helps us is given to those that code before positions too."""
    return torch.cat([exact[:, :, :first], coded[:, :, first:]], 2)
