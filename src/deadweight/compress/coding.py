"""From what was measured to a model with a coded cache: bases, bits, coders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deadweight.compress.basis import Basis, Structure, best_basis, blocks_of
from deadweight.compress.bits import allocate_bits, group_losses, runs_of
from deadweight.compress.cache_moments import FIRST, CacheMoments
from deadweight.compress.locate import Heads
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.slim.cache import Coder, SideCoder, install_caches
from deadweight.slim.format import CacheSpec, SideSpec, SlimSpec

SIDES = ("keys", "values")
WIDTH = 16  # bits of a number of the cache that shares are about


@dataclass(frozen=True)
class CacheBasis:
    """The bases of one attention: for every set of heads, of keys and of values."""

    heads: Heads
    rates: Tensor | None
    keys: tuple[Basis, ...]
    values: tuple[Basis, ...]

    def side(self, name: str) -> tuple[Basis, ...]:
        return self.keys if name == "keys" else self.values


def cache_basis(moments: CacheMoments, structure: Structure) -> CacheBasis:
    """The best bases of one attention. `structure` says how far keys are mixed; values are mixed inside a set."""
    heads = moments.heads
    blocks = blocks_of(structure, moments.keys.joined, heads.d_qk, heads.planes)
    whole = [list(range(moments.values.joined * heads.d_v))]
    keys = tuple(best_basis(*each, blocks) for each in zip(*moments.side("keys"), strict=True))
    values = tuple(best_basis(*each, whole) for each in zip(*moments.side("values"), strict=True))
    return CacheBasis(heads, moments.rates, keys, values)


@dataclass(frozen=True)
class Allocation:
    """The coded caches of all attentions, and the loss that is predicted for them."""

    specs: dict[str, CacheSpec]
    orders: dict[str, dict[str, list[list[int]]]]  # by attention and side: the coordinates of every set, as stored
    predicted: float  # nats per token
    share: float  # of a cache of 16-bit numbers, everything included


def bytes_for(bases: Sequence[CacheBasis], share: float, tokens: int) -> int:
    """Bytes per token that are left for codes if a sequence of so many tokens shall take this share of 16 bits."""
    empty = [spec_of(b, {side: [(0,) * 8] * len(b.side(side)) for side in SIDES}) for b in bases]
    before = sum(spec.bytes_before(tokens) for spec in empty)
    return int((share * before - sum(spec.bytes_at(tokens) for spec in empty)) // tokens)


def allocate(bases: Sequence[CacheBasis], share: float, tokens: int) -> Allocation:
    """The widths of all coordinates with the least predicted loss within a share of a 16-bit cache."""
    budget = bytes_for(bases, share, tokens)
    if budget <= 0:
        raise DeadweightError(
            f"found --keep-kv {share}; at {tokens:,} tokens the first {FIRST} of a sequence, which are not coded, and "
            f"the scales of the others take {smallest_share(bases, tokens):.3f} of the cache: expected more"
        )
    sets = [(b, side, i) for b in bases for side in SIDES for i in range(len(b.side(side)))]
    losses = [group_losses(b.side(side)[i].cost) for b, side, i in sets]
    widths, predicted = allocate_bits(torch.cat(losses), budget)
    runs: dict[str, dict[str, list[tuple[int, ...]]]] = {b.heads.path: {s: [] for s in SIDES} for b in bases}
    orders: dict[str, dict[str, list[list[int]]]] = {b.heads.path: {s: [] for s in SIDES} for b in bases}
    for (b, side, i), own in zip(sets, widths.split([len(x) for x in losses]), strict=True):
        run, order = runs_of(own.tolist(), len(b.side(side)[i].cost))
        runs[b.heads.path][side].append(run)
        orders[b.heads.path][side].append(order)
    specs = {b.heads.path: spec_of(b, runs[b.heads.path]) for b in bases}
    return Allocation(specs, orders, predicted, share_of(list(specs.values()), tokens))


def share_of(specs: Sequence[CacheSpec], tokens: int) -> float:
    """What sequences of so many tokens take of a cache of 16-bit numbers."""
    return sum(s.bytes_at(tokens) for s in specs) / sum(s.bytes_before(tokens) for s in specs)


def smallest_share(bases: Sequence[CacheBasis], tokens: int) -> float:
    return share_of([spec_of(b, {side: [(0,) * 8] * len(b.side(side)) for side in SIDES}) for b in bases], tokens)


def spec_of(basis: CacheBasis, runs: dict[str, list[tuple[int, ...]]]) -> CacheSpec:
    heads = basis.heads
    keys, values = (SideSpec(len(basis.side(side)[0].mean), tuple(runs[side])) for side in SIDES)
    pairs = len(heads.planes) if basis.rates is not None else 0
    return CacheSpec(heads.heads, heads.key_heads, heads.d_qk, heads.d_v, pairs, FIRST, keys, values)


def with_coded_cache(
    model: nn.Module, bases: Sequence[CacheBasis], plan: Allocation, precision: torch.dtype | None = None
) -> tuple[nn.Module, SlimSpec]:
    """A copy of the model that shares its weights and codes its cache; its maps are rounded to a precision."""
    module = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    slim = SlimSpec(caches=plan.specs)
    install_caches(module, slim.caches)
    for basis in bases:
        path = basis.heads.path
        coder = module.get_submodule(f"{path}.coder").to(device_of(model), float_of(model))
        fill(coder, basis, plan.orders[path])
        for tensor in coder.buffers():
            if precision is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(precision).to(tensor.dtype)
    return module, slim


@torch.no_grad()
def fill(coder: nn.Module, basis: CacheBasis, orders: dict[str, list[list[int]]]) -> None:
    """Give a coder its maps, on the device and in the precision of the model."""
    assert isinstance(coder, Coder)
    for name, side in (("keys", coder.keys), ("values", coder.values)):
        fill_side(side, basis.side(name), orders[name])
    if basis.rates is not None:
        places = [pair[i] for i in range(2) for pair in basis.heads.planes]
        coder.pair_places.copy_(torch.tensor(places, dtype=torch.int32))
        coder.rates.copy_(basis.rates.float().view(torch.int32))


def fill_side(side: SideCoder, bases: Sequence[Basis], orders: Sequence[Sequence[int]]) -> None:
    for i, (basis, order) in enumerate(zip(bases, orders, strict=True)):
        side.mean[i] = basis.mean.to(side.mean)
        at = torch.tensor(order, dtype=torch.long)
        real = (at >= 0).to(basis.encode)
        at = at.clamp(min=0)
        side.get_buffer(f"decode_{i}").copy_(basis.decode[:, at] * real)
        side.get_buffer(f"encode_{i}").copy_(basis.encode[at] * real[:, None])
