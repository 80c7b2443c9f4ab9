"""From what was measured to a model with a coded cache: bases, bits, coders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deadweight.compress.basis import Basis, SharedBasis, Structure, ValuesBasis, blocks_of, shared_basis, values_basis
from deadweight.compress.bits import allocate_bits, group_losses, runs_of
from deadweight.compress.cache_moments import FIRST, MeasuredCache
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.slim.coded_attention import install_caches
from deadweight.slim.coder import Coder, Stage
from deadweight.slim.codes import GROUP, LEVEL_ERRORS
from deadweight.slim.format import CacheSpec, CodeSpec, SlimSpec

Runs = tuple[int, ...]  # coordinates with 8, 7, … 1 bits
NOTHING: Runs = (0,) * 8
JOINT_BELOW = 0.16  # share of a 16-bit cache below which keys and values are coded as one vector, where that is cheap
SMALL = 512  # keys and values of an attention that may be mixed freely: every step of decoding transforms all keys
ROUNDS = 3  # of allocation: bits of keys decide what they say about values, which decides the bits of values


@dataclass(frozen=True)
class Maps:
    """What one stage of one set stores: runs of widths, and its coordinates in that order."""

    runs: Runs
    encode: Tensor  # (stored, inputs)
    decode: Tensor  # (outputs, stored)


@dataclass(frozen=True)
class SetPlan:
    """How one set of key heads is coded."""

    mean: Tensor
    shared: Maps
    values: Maps


@dataclass(frozen=True)
class CachePlan:
    """How one attention is coded."""

    cache: MeasuredCache
    joint: bool
    sets: tuple[SetPlan, ...]

    @property
    def spec(self) -> CacheSpec:
        return spec_of(self.cache, self.joint, [(s.shared.runs, s.values.runs) for s in self.sets])


@dataclass(frozen=True)
class Allocation:
    """The coded caches of all attentions, and the loss that is predicted for them."""

    plans: tuple[CachePlan, ...]
    predicted: float  # nats per token
    share: float  # of a cache of 16-bit numbers, everything included

    @property
    def specs(self) -> dict[str, CacheSpec]:
        return {plan.cache.heads.path: plan.spec for plan in self.plans}


def spec_of(cache: MeasuredCache, joint: bool, runs: Sequence[tuple[Runs, Runs]]) -> CacheSpec:
    """The format of a cache whose sets have these runs of shared codes and of value codes."""
    heads, keys, size = cache.heads, cache.sets[0].keys, len(cache.sets[0].mean)
    shared, values = zip(*runs, strict=True)
    pairs = len(heads.planes) if cache.rates is not None else 0
    stages = CodeSpec(size if joint else keys, tuple(shared)), CodeSpec(size - keys, tuple(values))
    return CacheSpec(heads.heads, heads.key_heads, heads.d_qk, heads.d_v, pairs, FIRST, *stages)


def usual_structure(cache: MeasuredCache, share: float) -> Structure:
    """Small attentions mix all of their keys, and at few bits their values too; large ones the keys of each head."""
    heads = cache.heads
    if heads.key_heads * (heads.d_qk + heads.d_v) > SMALL:
        return "head"
    return "joint" if share < JOINT_BELOW else "all"


def blocks_for(cache: MeasuredCache, structure: Structure) -> list[list[int]]:
    """The numbers of a set that the first stage mixes."""
    heads = cache.heads
    if structure == "joint":
        return [list(range(len(cache.sets[0].mean)))]
    return blocks_of(structure, heads.key_heads // len(cache.sets), heads.d_qk, heads.planes)


def fixed_share(caches: Sequence[MeasuredCache], structures: Sequence[Structure], tokens: int) -> float:
    """What the first tokens of a sequence and the scales of the others take of a 16-bit cache."""
    one = (8, *NOTHING[1:])  # a stage that stores anything stores a scale
    taken = before = 0
    for cache, structure in zip(caches, structures, strict=True):
        stages = (one, NOTHING) if structure == "joint" else (one, one)
        spec = spec_of(cache, structure == "joint", [stages, *[(NOTHING, NOTHING)] * (len(cache.sets) - 1)])
        taken += spec.bytes_at(tokens) - tokens * 8 * sum(stage is one for stage in stages)
        before += spec.bytes_before(tokens)
    return taken / before


def structures_for(caches: Sequence[MeasuredCache], structure: Structure | None, share: float) -> list[Structure]:
    return [structure or usual_structure(cache, share) for cache in caches]


def smallest_share(caches: Sequence[MeasuredCache], structure: Structure | None, tokens: int) -> float:
    return fixed_share(caches, structures_for(caches, structure, 0.0), tokens)


def allocate(
    caches: Sequence[MeasuredCache], share: float, tokens: int, structure: Structure | None = None
) -> Allocation:
    """The widths of all coordinates with the least predicted loss within a share of a 16-bit cache."""
    structures = structures_for(caches, structure, share)
    fixed = fixed_share(caches, structures, tokens)
    before = sum(2 * c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches)
    budget = int((share - fixed) * before)
    if budget <= 0:
        raise DeadweightError(
            f"found --keep-kv {share}; at {tokens:,} tokens the first {FIRST} of a sequence, which are not coded, and "
            f"the scales of the others take {fixed:.3f} of the cache: expected more"
        )
    pairs = zip(caches, structures, strict=True)
    shared = [shared_basis(m, blocks_for(cache, kind)) for cache, kind in pairs for m in cache.sets]
    values, widths, predicted = allocate_stages(shared, budget)
    sets = iter(
        set_plan(basis, second, *own)
        for basis, second, own in zip(shared, values, zip(*widths, strict=True), strict=True)
    )
    plans = tuple(
        CachePlan(cache, kind == "joint", tuple(next(sets) for _ in cache.sets))
        for cache, kind in zip(caches, structures, strict=True)
    )
    specs = [plan.spec for plan in plans]
    taken = sum(s.bytes_at(tokens) for s in specs) / sum(s.bytes_before(tokens) for s in specs)
    return Allocation(plans, predicted, taken)


Widths = list[list[int]]


def allocate_stages(
    shared: Sequence[SharedBasis], budget: int
) -> tuple[list[ValuesBasis | None], tuple[Widths, Widths], float]:
    """Bits of both stages of all sets; some rounds of it, because what shared codes predict depends on their bits.

    Returns the bases of values (None where they are coded with the keys), widths of groups by stage, and the loss.
    """
    first = [group_losses(s.basis.cost) for s in shared]
    errors = torch.tensor(LEVEL_ERRORS, dtype=torch.float64)
    rounding = [torch.zeros(len(s.basis.cost), dtype=torch.float64) for s in shared]  # as if keys were exact
    for _ in range(ROUNDS):
        values = [None if s.is_joint else values_basis(s, e) for s, e in zip(shared, rounding, strict=True)]
        second = [group_losses(v.basis.cost) if v is not None else first[0][:0] for v in values]
        widths, predicted = allocate_bits(torch.cat([*first, *second]), budget)
        parts = widths.split([len(x) for x in (*first, *second)])
        ours = parts[: len(shared)]
        rounding = [errors[w].repeat_interleave(GROUP)[: len(s.basis.cost)] for s, w in zip(shared, ours, strict=True)]
    return values, ([w.tolist() for w in ours], [w.tolist() for w in parts[len(shared) :]]), predicted


def set_plan(shared: SharedBasis, values: ValuesBasis | None, widths: list[int], more: list[int]) -> SetPlan:
    """The maps of one set, of coordinates that have bits."""
    moments, basis = shared.moments, shared.basis
    decode = basis.decode if values is None else torch.cat([basis.decode, values.predict])
    size = len(moments.mean) - moments.keys
    none = Basis(basis.encode.new_zeros(0, size), basis.decode.new_zeros(size, 0), basis.cost[:0])
    own = none if values is None else values.basis
    return SetPlan(moments.mean, stored(basis.encode, decode, widths), stored(own.encode, own.decode, more))


def stored(encode: Tensor, decode: Tensor, widths: list[int]) -> Maps:
    """The coordinates with bits, the widest first; what fills up the last group of eight is zero."""
    runs, order = runs_of(widths, len(encode))
    at = torch.tensor(order, dtype=torch.long)
    real = (at >= 0).to(encode)
    at = at.clamp(min=0)
    if not len(encode):
        return Maps(runs, encode, decode)
    return Maps(runs, encode[at] * real[:, None], decode[:, at] * real)


def with_coded_cache(
    model: nn.Module, plan: Allocation, precision: torch.dtype | None = None
) -> tuple[nn.Module, SlimSpec]:
    """A copy of the model that shares its weights and codes its cache; its maps are rounded to a precision."""
    module = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    slim = SlimSpec(caches=plan.specs)
    install_caches(module, slim.caches)
    for cache in plan.plans:
        coder = module.get_submodule(f"{cache.cache.heads.path}.coder").to(device_of(model), float_of(model))
        assert isinstance(coder, Coder)
        fill(coder, cache)
        for tensor in coder.buffers():
            if precision is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(precision).to(tensor.dtype)
    return module, slim


@torch.no_grad()
def fill(coder: Coder, plan: CachePlan) -> None:
    """Give a coder its maps, on the device and in the precision of the model."""
    for i, own in enumerate(plan.sets):
        coder.mean[i] = own.mean.to(coder.mean)
        fill_stage(coder.shared, i, own.shared)
        fill_stage(coder.values, i, own.values)
    cache = plan.cache
    if cache.rates is not None:
        places = [pair[i] for i in range(2) for pair in cache.heads.planes]
        coder.pair_places.copy_(torch.tensor(places, dtype=torch.int32))
        coder.rates.copy_(cache.rates.float().view(torch.int32))


def fill_stage(stage: Stage, index: int, maps: Maps) -> None:
    stage.encode(index).copy_(maps.encode)
    stage.decode(index).copy_(maps.decode)
