"""From measurements to a model with a coded cache: bases, bits, coders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from deadweight.compress.bit_allocation import ERRORS, RowPlan, allocate_units, plan_row, wanted_bits
from deadweight.compress.cache_bases import (
    Basis,
    Roots,
    blocks_of,
    in_second_block,
    keys_basis,
    value_roots,
    values_basis,
)
from deadweight.compress.cache_moments import MeasuredCache, SetMoments
from deadweight.compress.settings import Structure
from deadweight.compress.streaming import device_of, float_of
from deadweight.compress.uncoded_tokens import UNCODED_TOKENS
from deadweight.errors import DeadweightError
from deadweight.slim.coder import Coder
from deadweight.slim.codes import STEPS, UNIT
from deadweight.slim.format import CacheSpec, SlimSpec, UnitRun
from deadweight.slim.install_caches import install_caches
from deadweight.threads import each, one_thread

SMALL = 512  # keys and values of an attention up to which all are mixed: every decoding step transforms all keys
LARGE_ROW = 128  # numbers of a set from which on units are allotted in eights: a GPU loads 16 bytes at once
WORTH = 0.95  # of the loss of two stages: below this, one vector is worth its extra work


@dataclass(frozen=True)
class SetPlan:
    """How one set of heads is coded: the units of its row, and the maps of its stages."""

    moments: SetMoments
    row: RowPlan
    keys: Basis
    predict: Tensor  # (values, coordinates of keys)
    values: Basis | None  # None: keys and values are one vector

    @property
    def runs(self) -> tuple[UnitRun, ...]:
        """The units in the order in which they are stored: those that are divided alike are neighbours."""
        each = [tuple(w) for w in self.row.widths.T.tolist()]
        return tuple(UnitRun(len(list(same)), widths) for widths, same in groupby(each))


@dataclass(frozen=True)
class CachePlan:
    """How one attention is coded."""

    cache: MeasuredCache
    sets: tuple[SetPlan, ...]

    @property
    def spec(self) -> CacheSpec:
        row = self.sets[0].row
        return spec_of(self.cache, row.key_fields, len(row.widths), tuple(own.runs for own in self.sets))

    @property
    def loss(self) -> float:
        return sum(own.row.loss for own in self.sets)


@dataclass(frozen=True)
class Allocation:
    """The coded caches of all attentions, and their predicted loss."""

    plans: tuple[CachePlan, ...]
    predicted: float  # nats per token
    share: float  # of a cache of 16-bit numbers, everything included

    @property
    def specs(self) -> dict[str, CacheSpec]:
        return {plan.cache.heads.path: plan.spec for plan in self.plans}


@dataclass(frozen=True)
class SetBases:
    """The bases of one set of heads that do not depend on its bits: for keys, and for keys and values as one vector."""

    keys: Basis | None
    joint: Basis | None
    values: tuple[Roots, ...] = ()  # of the values that are coded after keys


class CacheOptions:
    """The ways to code every attention, one option for every number of units.

    Losses are computed once for all budgets, for some options; between them the logarithm of the loss is interpolated.
    Plans are made on demand: all of them together would take more memory than the model.
    """

    def __init__(self, caches: Sequence[MeasuredCache], structure: Structure | None = None) -> None:
        self.caches, self.structure = tuple(caches), structure
        self.known_losses: dict[int, Tensor] = {}
        self.known_bases: dict[int, list[SetBases]] = {}

    def step(self, index: int) -> int:
        """The number of units by which neighbouring options differ."""
        return 8 if len(self.caches[index].sets[0].mean) >= LARGE_ROW else 1

    def losses(self, index: int) -> Tensor:
        """The losses of the options of one attention, up to eight bits per number."""
        if index not in self.known_losses:
            count = max(1, -(-len(self.caches[index].sets[0].mean) // (2 * self.step(index))))
            tried = tried_options(count)
            logs = torch.tensor([max(self.loss(index, k), 1e-300) for k in tried], dtype=torch.float64).log()
            self.known_losses[index] = interpolate(tried, logs, count).exp()
        return self.known_losses[index]

    def bases(self, index: int) -> list[SetBases]:
        if index not in self.known_bases:
            cache = self.caches[index]
            self.known_bases[index] = [bases_of(cache, own, self.structure) for own in cache.sets]
        return self.known_bases[index]

    def plan(self, index: int, option: int) -> CachePlan:
        """The plan with (option + 1) · step units in the row of every set."""
        return plan_cache(self.caches[index], self.bases(index), (option + 1) * self.step(index))

    def loss(self, index: int, option: int) -> float:
        """The loss of that plan."""
        rows = rows_of(self.caches[index], self.bases(index), (option + 1) * self.step(index))[1]
        return sum(row.loss for row in rows)

    def unit_bytes(self, index: int) -> int:
        """The number of bytes by which neighbouring options differ."""
        return 2 * self.step(index) * len(self.caches[index].sets)


def tried_options(count: int) -> list[int]:
    """The options whose loss is computed: all of the first ones, then fewer and fewer, and the last."""
    tried, option = [], 0
    while option < count - 1:
        tried.append(option)
        option += 1 + option // 3
    return [*tried, count - 1]


def interpolate(places: Sequence[int], values: Tensor, count: int) -> Tensor:
    """Values at 0 … count − 1, by linear interpolation."""
    at, known = torch.arange(count, dtype=torch.float64), torch.tensor(places, dtype=torch.float64)
    after = torch.searchsorted(known, at).clamp(1, max(1, len(places) - 1)) if len(places) > 1 else None
    if after is None:
        return values.expand(count)
    left, right = known[after - 1], known[after]
    return values[after - 1] + (values[after] - values[after - 1]) * (at - left) / (right - left)


def spec_of(cache: MeasuredCache, key_fields: int, fields: int, sets: tuple[tuple[UnitRun, ...], ...]) -> CacheSpec:
    """The spec of a cache whose sets have these units."""
    heads = cache.heads
    pairs = len(heads.rotary_pairs) if cache.rates is not None else 0
    sizes = (heads.heads, heads.key_heads, heads.d_qk, heads.d_v, pairs, UNCODED_TOKENS)
    spec = CacheSpec(*sizes, key_fields, fields - key_fields, sets)
    form = heads.form
    if form is None:
        return spec
    reader = "states" if form.reached else "own attention"
    return replace(spec, reader=reader, rotated_second=form.rotated_second, copies=form.copies)


def bases_of(cache: MeasuredCache, moments: SetMoments, structure: Structure | None) -> SetBases:
    """By default all keys of a set are mixed; a small attention may also code keys and values as one vector."""
    heads = cache.heads
    small = heads.key_heads * (heads.d_qk + heads.d_v) <= SMALL
    if heads.form is not None and heads.key_heads == 1:
        small = True  # values of all tokens are decoded anyway: to decode them jointly with keys costs no more
    keys = joint = None
    if structure != "joint":
        blocks = blocks_for(cache, moments.keys, structure)
        keys = keys_basis(moments, blocks, joint=False)
        in_pairs = structure == "half" and len(blocks) == 2 * (moments.keys // heads.d_qk)
        keys = in_second_block(keys, blocks) if in_pairs else keys
    if structure == "joint" or (structure is None and small):
        joint = keys_basis(moments, [list(range(len(moments.mean)))], joint=True)
    return SetBases(keys, joint, () if keys is None else value_roots(moments))


def plan_cache(cache: MeasuredCache, bases: Sequence[SetBases], units: int) -> CachePlan:
    """The plan of one attention with this many units per row."""
    joint, rows = rows_of(cache, bases, units)
    make = one_vector if joint else two_stages
    return CachePlan(cache, tuple(make(*own) for own in zip(cache.sets, bases, rows, strict=True)))


def rows_of(cache: MeasuredCache, bases: Sequence[SetBases], units: int) -> tuple[bool, list[RowPlan]]:
    """The rows of an attention, and whether keys and values are one vector: if its predicted loss is lower."""
    one = [plan_row(units, b.joint.cost, b.joint.cost[:0]) for b in bases if b.joint is not None]
    two = [two_stages_row(m, b, units) for m, b in zip(cache.sets, bases, strict=True) if b.keys is not None]
    if not one or not two:
        return bool(one), one or two
    joint = sum(row.loss for row in one) < WORTH * sum(row.loss for row in two)
    return joint, one if joint else two


def one_vector(moments: SetMoments, bases: SetBases, row: RowPlan) -> SetPlan:
    """Code keys and values of a set as one vector."""
    basis = bases.joint
    assert basis is not None
    keys = replace(basis, decode=basis.decode[: moments.keys])
    return SetPlan(moments, row, keys, basis.decode[moments.keys :], None)


def two_stages_row(moments: SetMoments, bases: SetBases, units: int) -> RowPlan:
    """Predict values from the codes of keys: first as if keys had half of the bits, then with their actual bits."""
    keys = bases.keys
    assert keys is not None
    errors = ERRORS[wanted_bits(keys.cost, UNIT * units // 2)]
    values = values_basis(moments, keys, errors, bases.values)
    row = plan_row(units, keys.cost, values.basis.cost, keys.upper)
    values = values_basis(moments, keys, row.errors(len(keys.cost)), bases.values)
    return plan_row(units, keys.cost, values.basis.cost, keys.upper)


def two_stages(moments: SetMoments, bases: SetBases, row: RowPlan) -> SetPlan:
    """Code the keys of a set, and then what the prediction of its values misses."""
    keys = bases.keys
    assert keys is not None
    values = values_basis(moments, keys, row.errors(len(keys.cost)), bases.values)
    return SetPlan(moments, row, keys, values.predict, values.basis)


def blocks_for(cache: MeasuredCache, keys: int, structure: Structure | None) -> list[list[int]]:
    """Which keys of a set are mixed with each other."""
    if structure in (None, "joint", "all"):
        return [list(range(keys))]
    size = cache.heads.d_qk
    own = blocks_of(structure, size, by_speed(cache))
    return [[start + i for i in block] for start in range(0, keys, size) for block in own]


def by_speed(cache: MeasuredCache) -> list[tuple[int, int]]:
    """Rotary pairs, the fastest first."""
    pairs = list(cache.heads.rotary_pairs)
    if cache.rates is None:
        return pairs
    return [pairs[i] for i in cache.rates.abs().argsort(descending=True, stable=True).tolist()]


def fixed_share(caches: Sequence[MeasuredCache], tokens: int) -> float:
    """The share of a 16-bit cache that the uncoded tokens and the scales take."""
    whole = [2 * c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches]
    uncoded = min(UNCODED_TOKENS, tokens)
    taken = sum(uncoded * size + tokens * len(c.sets) for c, size in zip(caches, whole, strict=True))
    return taken / (tokens * sum(whole))


def bytes_for_units(caches: Sequence[MeasuredCache], share: float, tokens: int) -> int:
    """The bytes per token that a share of a 16-bit cache leaves for units; 0 or less if the share is too small."""
    whole = sum(2 * c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches)
    return int((share - fixed_share(caches, tokens)) * whole)


def allocate(options: CacheOptions, share: float, tokens: int) -> Allocation:
    """The units of all attentions with the least predicted loss within a share of a 16-bit cache."""
    caches = options.caches
    budget, sizes = bytes_for_units(caches, share, tokens), [options.unit_bytes(i) for i in range(len(caches))]
    if budget < sum(sizes):
        least = fixed_share(caches, tokens) + sum(sizes) / sum(
            2 * c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches
        )
        raise DeadweightError(
            f"found --keep-kv {share}; at {tokens:,} tokens the first {UNCODED_TOKENS} of a sequence, which are not "
            f"coded, the scales of the others and the fewest codes take {least:.3f} of the cache: expected more"
        )
    losses = each(options.losses, range(len(caches)))
    with one_thread():  # the matrices are small
        plans = tuple(options.plan(i, k) for i, k in enumerate(allocate_units(losses, sizes, budget)))
    specs = [plan.spec for plan in plans]
    taken = sum(s.bytes_at(tokens) for s in specs) / sum(s.bytes_before(tokens) for s in specs)
    return Allocation(plans, sum(plan.loss for plan in plans), taken)


def select_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Select rows in this order; −1 gives a row of zeros."""
    return rows[order.clamp(min=0)] * (order >= 0)[:, None]


def with_coded_cache(
    model: nn.Module, plan: Allocation, precision: torch.dtype | None = None
) -> tuple[nn.Module, SlimSpec]:
    """A copy of the model that shares its weights and codes its cache; its transforms are rounded to a precision."""
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
    """Fill in the transforms of a coder, on the device and in the precision of the model."""
    order = pair_order(plan.cache)
    for i, own in enumerate(plan.sets):
        keys, at = own.moments.keys, in_sets(order, own.moments.keys)
        widths, coordinates = own.row.widths, own.row.coordinates
        n = own.row.key_fields
        fill_stage(coder.key_encode[i], coder.key_decode[i], reorder_keys(own.keys, at), (widths[:n], coordinates[:n]))
        steps = torch.tensor(STEPS, dtype=torch.float64)[widths[:n]].flatten()[:, None]
        coder.predict[i].copy_(select_rows(own.predict.T, coordinates[:n].flatten()) * steps)
        if own.values is not None:
            fill_stage(coder.value_encode[i], coder.value_decode[i], own.values, (widths[n:], coordinates[n:]))
        coder.key_mean.view(len(plan.sets), -1)[i].copy_(own.moments.mean[:keys][at])
        coder.value_mean.view(len(plan.sets), -1)[i].copy_(own.moments.mean[keys:])
    if plan.cache.rates is not None:
        places = [pair[i] for i in range(2) for pair in plan.cache.heads.rotary_pairs]
        coder.pair_places.copy_(torch.tensor(places, dtype=torch.int32))
        coder.rates.copy_(plan.cache.rates.float().view(torch.int32))


def fill_stage(encode: Tensor, decode: Tensor, basis: Basis, row: tuple[Tensor, Tensor]) -> None:
    """Fill in the transforms of one stage of one set: to and from coordinates in units of their quantisation steps."""
    widths, coordinates = (x.flatten() for x in row)
    steps = torch.tensor(STEPS, dtype=torch.float64)[widths][:, None]
    encode.copy_(select_rows(basis.encode, coordinates) / steps.clamp(min=1e-9))
    decode.copy_(select_rows(basis.decode.T, coordinates) * steps)


def reorder_keys(basis: Basis, keys: Tensor) -> Basis:
    """A basis with the keys in another order; values in the same vector stay last."""
    encode = torch.cat([basis.encode[:, keys], basis.encode[:, len(keys) :]], 1)
    return replace(basis, encode=encode, decode=basis.decode[keys])


def pair_order(cache: MeasuredCache) -> Tensor:
    """The order of a key head's dimensions in a coder: first ones of rotary pairs, second ones, non-rotary ones."""
    pairs = cache.heads.rotary_pairs if cache.rates is not None else ()
    turned = [pair[i] for i in range(2) for pair in pairs]
    return torch.tensor([*turned, *(i for i in range(cache.heads.d_qk) if i not in set(turned))])


def in_sets(order: Tensor, keys: int) -> Tensor:
    """The same order for neighbouring heads side by side."""
    return (torch.arange(0, keys, len(order))[:, None] + order).flatten()
