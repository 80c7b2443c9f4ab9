"""From measured moments to a model with a coded cache: its bases, bits and coders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deadweight.compress.bit_allocation import allocate_bits, group_losses, runs_of
from deadweight.compress.cache_bases import (
    Basis,
    SharedBasis,
    ValuesBasis,
    blocks_of,
    shared_basis,
    values_basis,
)
from deadweight.compress.cache_moments import MeasuredCache
from deadweight.compress.settings import EXEMPT_TOKENS, Structure
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.slim.coded_attention import install_caches
from deadweight.slim.coder import Coder, Stage
from deadweight.slim.codes import LEVEL_ERRORS
from deadweight.slim.format import GROUP, CacheSpec, CodeSpec, SlimSpec

Runs = tuple[int, ...]  # how many coordinates have each of WIDTHS bits
NOTHING: Runs = (0,) * 8
JOINT_BELOW = 0.16  # share of a 16-bit cache below which keys and values are coded as one vector, where that is cheap
SMALL = 512  # keys and values of an attention that may be mixed freely: every step of decoding transforms all keys
ROUNDS = 3  # of allocation: bits of keys decide what they say about values, which decides the bits of values


@dataclass(frozen=True)
class Maps:
    """The maps of one stage of one set of heads: coordinates per bit width, and which ones, in that order."""

    runs: Runs
    order: Tensor  # of the coordinates, as indices into those of the basis; −1 fills up the last group of eight
    encode: Tensor  # (stored, inputs)
    decode: Tensor  # (outputs, stored)


@dataclass(frozen=True)
class SetPlan:
    """How one set of values is coded, and the sets of keys that it is predicted from."""

    mean: Tensor  # of keys, then of values
    shared: tuple[Maps, ...]
    predict: Tensor  # (values, stored shared coordinates)
    values: Maps


@dataclass(frozen=True)
class CachePlan:
    """How one attention is coded."""

    cache: MeasuredCache
    joint: bool
    sets: tuple[SetPlan, ...]

    @property
    def spec(self) -> CacheSpec:
        shared = [maps.runs for own in self.sets for maps in own.shared]
        return spec_of(self.cache, self.joint, shared, [own.values.runs for own in self.sets])


@dataclass(frozen=True)
class Allocation:
    """The coded caches of all attentions, and the loss that is predicted for them."""

    plans: tuple[CachePlan, ...]
    predicted: float  # nats per token
    share: float  # of a cache of 16-bit numbers, everything included

    @property
    def specs(self) -> dict[str, CacheSpec]:
        return {plan.cache.heads.path: plan.spec for plan in self.plans}


def spec_of(cache: MeasuredCache, joint: bool, shared: Sequence[Runs], values: Sequence[Runs]) -> CacheSpec:
    """The format of a cache whose sets have these runs of shared codes and of value codes."""
    heads = cache.heads
    pairs = len(heads.rotary_pairs) if cache.rates is not None else 0
    own = heads.key_heads * heads.d_v // len(values)
    inputs = heads.key_heads * heads.d_qk // len(shared) + (own if joint else 0)
    stages = CodeSpec(inputs, tuple(shared)), CodeSpec(own, tuple(values))
    return CacheSpec(heads.heads, heads.key_heads, heads.d_qk, heads.d_v, pairs, EXEMPT_TOKENS, *stages)


def usual_structure(cache: MeasuredCache, share: float) -> Structure:
    """Small attentions mix all of their keys, and at few bits their values too; large ones the keys of each head."""
    heads = cache.heads
    if heads.key_heads * (heads.d_qk + heads.d_v) > SMALL:
        return "head"
    return "joint" if share < JOINT_BELOW else "all"


def blocks_for(cache: MeasuredCache, structure: Structure) -> list[list[list[int]]]:
    """For every set of keys that a set of values has, which of its numbers the first stage mixes."""
    heads, own = cache.heads, cache.sets[0]
    if structure in ("joint", "all"):
        return [[list(range(len(own.mean) if structure == "joint" else own.keys))]]
    return [blocks_of(structure, heads.d_qk, heads.rotary_pairs)] * (own.keys // heads.d_qk)


def fixed_share(caches: Sequence[MeasuredCache], structures: Sequence[Structure], tokens: int) -> float:
    """The share of a 16-bit cache that the uncoded first tokens and the scale exponents take."""
    taken = before = 0
    for cache, structure in zip(caches, structures, strict=True):
        spec = spec_of(cache, structure == "joint", [NOTHING] * len(cache.sets), [NOTHING] * len(cache.sets))
        scales = 1 if structure == "joint" else 2
        taken += spec.bytes_at(tokens) + tokens * (scales - spec.row_bytes)
        before += spec.bytes_before(tokens)
    return taken / before


def structures_for(caches: Sequence[MeasuredCache], structure: Structure | None, share: float) -> list[Structure]:
    return [structure or usual_structure(cache, share) for cache in caches]


def bytes_for_codes(
    caches: Sequence[MeasuredCache], share: float, tokens: int, structure: Structure | None = None
) -> int:
    """Bytes per token that a share of a 16-bit cache leaves for codes; 0 or less if the share is too small."""
    fixed = fixed_share(caches, structures_for(caches, structure, share), tokens)
    return int((share - fixed) * sum(2 * c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches))


def allocate(
    caches: Sequence[MeasuredCache], share: float, tokens: int, structure: Structure | None = None
) -> Allocation:
    """The widths of all coordinates with the least predicted loss within a share of a 16-bit cache."""
    structures = structures_for(caches, structure, share)
    budget = bytes_for_codes(caches, share, tokens, structure)
    if budget <= 0:
        fixed = fixed_share(caches, structures, tokens)
        raise DeadweightError(
            f"found --keep-kv {share}; at {tokens:,} tokens the first {EXEMPT_TOKENS} of a sequence, which are not "
            f"coded, and the scales of the others take {fixed:.3f} of the cache: expected more"
        )
    pairs = list(zip(caches, structures, strict=True))
    shared = [shared_basis(own, blocks_for(cache, kind)) for cache, kind in pairs for own in cache.sets]
    sets, predicted = allocate_stages(shared, budget)
    each = iter(sets)
    plans = tuple(CachePlan(cache, kind == "joint", tuple(next(each) for _ in cache.sets)) for cache, kind in pairs)
    specs = [plan.spec for plan in plans]
    taken = sum(s.bytes_at(tokens) for s in specs) / sum(s.bytes_before(tokens) for s in specs)
    return Allocation(plans, predicted, taken)


def allocate_stages(shared: Sequence[SharedBasis], budget: int) -> tuple[list[SetPlan], float]:
    """Bits of both stages of all sets, in several rounds: what shared codes predict depends on their own bits."""
    first = [torch.cat([group_losses(basis.cost) for basis in own.sets]) for own in shared]
    rounding = [torch.zeros(sum(len(b.cost) for b in own.sets), dtype=torch.float64) for own in shared]
    for _ in range(ROUNDS):  # the first as if keys were exact
        values = [None if own.is_joint else values_basis(own, e) for own, e in zip(shared, rounding, strict=True)]
        second = [group_losses(v.basis.cost) if v is not None else first[0][:0] for v in values]
        widths, predicted = allocate_bits(torch.cat([*first, *second]), budget)
        parts = widths.split([len(x) for x in (*first, *second)])
        ours, more = parts[: len(shared)], parts[len(shared) :]
        rounding = [rounding_errors(own, w) for own, w in zip(shared, ours, strict=True)]
    return [set_plan(*own) for own in zip(shared, values, ours, more, strict=True)], predicted


def rounding_errors(shared: SharedBasis, widths: Tensor) -> Tensor:
    """The error of every shared coordinate, given the widths of groups of eight."""
    errors = torch.tensor(LEVEL_ERRORS, dtype=torch.float64)
    own = widths.split([-(-len(basis.cost) // GROUP) for basis in shared.sets])
    pairs = zip(shared.sets, own, strict=True)
    return torch.cat([errors[w].repeat_interleave(GROUP)[: len(basis.cost)] for basis, w in pairs])


def set_plan(shared: SharedBasis, values: ValuesBasis | None, widths: Tensor, more: Tensor) -> SetPlan:
    """The maps of one set of values and of its sets of keys, of coordinates that have bits."""
    moments = shared.moments
    own = widths.split([-(-len(basis.cost) // GROUP) for basis in shared.sets])
    maps = [stored(basis, w) for basis, w in zip(shared.sets, own, strict=True)]
    if values is None:
        joint = maps[0]
        keys = replace(joint, decode=joint.decode[: moments.keys])
        size = len(moments.mean) - moments.keys
        nothing = Maps(NOTHING, joint.order[:0], joint.encode.new_zeros(0, size), joint.encode.new_zeros(size, 0))
        return SetPlan(moments.mean, (keys,), joint.decode[moments.keys :], nothing)
    columns = values.predict.split([len(basis.cost) for basis in shared.sets], 1)
    predict = torch.cat([picked(c, m.order) for c, m in zip(columns, maps, strict=True)], 1)
    return SetPlan(moments.mean, tuple(maps), predict, stored(values.basis, more))


def stored(basis: Basis, widths: Tensor) -> Maps:
    """The coordinates with bits, the widest first."""
    runs, order = runs_of(widths.tolist(), len(basis.cost))
    at = torch.tensor(order, dtype=torch.long)
    return Maps(runs, at, picked(basis.encode.T, at).T, picked(basis.decode, at))


def picked(columns: Tensor, order: Tensor) -> Tensor:
    """Columns in this order; −1 is a column of zeros."""
    return columns[:, order.clamp(min=0)] * (order >= 0)


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
    heads, keys = plan.cache.heads, plan.cache.sets[0].keys
    order = pair_order(plan.cache)
    coder.key_mean.copy_(torch.cat([own.mean[:keys][in_sets(order, keys)] for own in plan.sets]))
    coder.value_mean.copy_(torch.cat([own.mean[keys:] for own in plan.sets]))
    for i, maps in enumerate(maps for own in plan.sets for maps in own.shared):
        at = in_sets(order, len(maps.decode))
        fill_stage(coder.shared, i, replace(maps, encode=before_values(maps.encode, at), decode=maps.decode[at]))
    for i, own in enumerate(plan.sets):
        coder.predict(i).copy_(own.predict)
        fill_stage(coder.values, i, own.values)
    if plan.cache.rates is not None:
        places = [pair[i] for i in range(2) for pair in heads.rotary_pairs]
        coder.pair_places.copy_(torch.tensor(places, dtype=torch.int32))
        coder.rates.copy_(plan.cache.rates.float().view(torch.int32))


def pair_order(cache: MeasuredCache) -> Tensor:
    """The dimensions of a key head as a coder has them: first ones of rotary pairs, second ones, those in no pair."""
    pairs = cache.heads.rotary_pairs if cache.rates is not None else ()
    turned = [pair[i] for i in range(2) for pair in pairs]
    return torch.tensor([*turned, *(i for i in range(cache.heads.d_qk) if i not in set(turned))])


def in_sets(order: Tensor, keys: int) -> Tensor:
    """The same order for the concatenated dimensions of several neighbouring heads."""
    return (torch.arange(0, keys, len(order))[:, None] + order).flatten()


def before_values(encode: Tensor, keys: Tensor) -> Tensor:
    """Columns of keys in another order; those of values, if there are any, stay behind them."""
    return torch.cat([encode[:, keys], encode[:, len(keys) :]], 1)


def fill_stage(stage: Stage, index: int, maps: Maps) -> None:
    stage.encode(index).copy_(maps.encode)
    stage.decode(index).copy_(maps.decode)
