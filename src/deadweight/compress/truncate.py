"""Cutting heads: new weights in place of the old ones, zero where nothing is kept, and what may then be left out.

Everything is a change of rows and columns in float64: keys and values are turned into the basis in which their first
dimensions matter most, the queries and the output projection take the regressions, means go into the bias behind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deadweight.compress.joined import Joined
from deadweight.compress.locate import Heads, Rows
from deadweight.compress.planes import Planes
from deadweight.compress.subspace import Subspace
from deadweight.save.facts import Fact, ZeroPlaces


@dataclass(frozen=True)
class Late:
    """What it takes to turn keys when they are read."""

    rates: Tensor  # radians per position of every plane
    scale: float  # by which positions make keys larger
    mean: Tensor  # of the keys of every set before positions


@dataclass(frozen=True)
class Spaces:
    """What was found out about one attention: the values of every group of merged key heads, and of every set of joined
    ones the still places and planes of their keys. None: cannot be cut."""

    heads: Heads
    merged: int
    joined: int
    mean: Tensor  # of what every query head gathers, h × merged·d_v
    values: tuple[Subspace | None, ...]
    still: tuple[Subspace | None, ...]
    planes: tuple[Planes | Joined | None, ...]
    late: Late | None = None  # keys are cached before positions: all their places are still

    @property
    def n_still(self) -> int:
        """Places of a set's keys that positions do not bind."""
        return self.joined * (len(self.heads.still) if self.late is None else self.heads.d_qk)

    @property
    def n_planes(self) -> int:
        return self.joined * len(self.heads.planes) if self.late is None else 0

    @property
    def still_places(self) -> list[int]:
        """Those places, where the keys of a set lie beside each other."""
        heads = self.heads
        own = heads.still if self.late is None else range(heads.d_qk)
        return [m * heads.d_qk + place for m in range(self.joined) for place in own]


@dataclass(frozen=True)
class Kept:
    """How much one attention keeps: dimensions of each group's values, still places and planes of each set's keys."""

    values: tuple[int, ...]
    still: tuple[int, ...]
    planes: tuple[int, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """Dimensions of the keys of every set: of a key head, if they are not joined."""
        return tuple(s + 2 * p for s, p in zip(self.still, self.planes, strict=True))


class LinearMap:
    """The weights of a linear layer as (rows, columns) in float64 on the CPU, however and wherever they are stored."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path, self.module = path, model.get_submodule(path)
        self.transposed = isinstance(self.module, Conv1D)
        weight = self.module.get_parameter("weight").detach().cpu().double()
        self.weight = weight.T.clone() if self.transposed else weight.clone()
        bias = self.module._parameters.get("bias")
        self.bias = None if bias is None else bias.detach().cpu().double().clone()

    def store(self) -> None:
        old = self.module.get_parameter("weight")
        new = self.weight.T if self.transposed else self.weight
        for name, tensor in (("weight", new), ("bias", self.bias)):
            if tensor is not None:
                made = tensor.to(old.device, old.dtype).contiguous()
                self.module.register_parameter(name, nn.Parameter(made, requires_grad=old.requires_grad))

    def turn(self, rows: Tensor, turn: Tensor) -> None:
        """rows ← turn · rows, weights and biases."""
        self.weight[rows] = turn.to(self.weight) @ self.weight[rows]
        if self.bias is not None:
            self.bias[rows] = turn.to(self.weight) @ self.bias[rows]

    def zero_rows(self, rows: Sequence[int]) -> list[Fact]:
        at = tuple(sorted(rows))
        facts: list[Fact] = [ZeroPlaces(f"{self.path}.weight", 1 if self.transposed else 0, at)]
        if self.bias is not None:
            facts.append(ZeroPlaces(f"{self.path}.bias", 0, at))
        return facts if at else []

    def zero_columns(self, columns: Sequence[int]) -> list[Fact]:
        at = tuple(sorted(columns))
        return [ZeroPlaces(f"{self.path}.weight", 0 if self.transposed else 1, at)] if at else []


def in_rows(rows: Rows, head: int | slice, turn: Tensor) -> tuple[Tensor, Tensor]:
    """A map of what attention sees of one head, or of several side by side, as a map of the rows behind it."""
    factor = rows.factor[head].flatten()
    return rows.places[head].flatten(), (turn * factor[None, :]) / factor[:, None]


def truncate(model: nn.Module, spaces: Spaces, kept: Kept, *, bias: bool) -> tuple[list[Fact], dict[str, Any]]:
    """Cut one attention in place. Returns what is zero now, and the packing of its cache.

    `bias`: the output projection may be given one where it has none, for the means of what is dropped.
    """
    heads, joined = spaces.heads, spaces.joined
    bare = heads.output is not None and bias_of(model, heads.output) is None
    facts, ups = cut_values(model, spaces, kept, bias=bias)
    facts += cut_keys(model, spaces, kept) if joined == 1 else join_keys(model, spaces, kept)
    places = [key_places(spaces, g, kept) for g in range(heads.key_heads // joined)]
    untouched = heads.query is None or heads.key is None
    packing = {
        "heads": heads.heads,
        "key_heads": heads.key_heads,
        "merged": spaces.merged,
        "joined": joined,
        "d_qk": heads.d_qk,
        "d_v": heads.d_v,
        "keys": [len(p) for p in places],
        "values": list(kept.values),
        "planes": list(kept.planes) if joined > 1 else [],
        "still": len(heads.still) if joined > 1 else 0,
        "late": len(heads.planes) if spaces.late else 0,
        "bias": heads.output if bare and bias_of(model, heads.output) is not None else None,
        "chosen": any(p != list(range(len(p))) for p in places),
        "needed": untouched and any(len(p) < heads.d_qk for p in places),
        "_spare": [*heads.makers] if spaces.merged > 1 or joined > 1 else [],  # what is not kept is never read
        "_key_places": [place for p in places for place in p],
        "_tensors": {f"up_{i}": up for i, up in enumerate(ups)}
        | (expansions(spaces, kept) if spaces.late else asks(spaces, kept) if joined > 1 else {}),
    }
    return facts, packing


def bias_of(model: nn.Module, path: str | None) -> Any:
    return None if path is None else model.get_submodule(path)._parameters.get("bias")


def key_places(spaces: Spaces, head: int, kept: Kept) -> list[int]:
    """What is kept of the places of a key head; of joined ones, beside each other, still places and both of planes."""
    heads, planes, joined = spaces.heads, spaces.planes[head], spaces.joined
    if joined == 1:
        chosen = range(len(heads.planes)) if planes is None else planes.kept(kept.planes[head])
        return sorted([*heads.still[: kept.still[head]], *(place for p in chosen for place in heads.planes[p])])
    numbers = numbers_kept(spaces, head, kept)
    turned = [(n % joined) * heads.d_qk + heads.planes[n // joined][side] for side in range(2) for n in numbers]
    return [*spaces.still_places[: kept.still[head]], *turned]


def numbers_kept(spaces: Spaces, head: int, kept: Kept) -> tuple[int, ...]:
    """Which complex numbers a set of joined heads keeps, counted plane by plane."""
    planes = spaces.planes[head]
    return () if planes is None else planes.kept(kept.planes[head])


def cut_values(model: nn.Module, spaces: Spaces, kept: Kept, *, bias: bool) -> tuple[list[Fact], list[Tensor]]:
    """New values in their best basis. The way back goes into the output projection; of merged heads it is returned."""
    heads, merged, d = spaces.heads, spaces.merged, spaces.heads.d_v
    if merged == 1 and all(s is None or r == d for s, r in zip(spaces.values, kept.values, strict=True)):
        return [], []
    assert heads.value is not None and heads.output is not None
    into, out = LinearMap(model, heads.value.module), LinearMap(model, heads.output)
    rows: list[int] = []
    columns: list[int] = []
    ups: list[Tensor] = []
    moved = torch.zeros(out.weight.shape[0], dtype=torch.float64)
    for g, (space, r) in enumerate(zip(spaces.values, kept.values, strict=True)):
        if space is None or (merged == 1 and r == d):
            continue
        turn = torch.zeros(merged * d, merged * d, dtype=torch.float64)
        turn[:r] = space.basis[:r]
        places, as_rows = in_rows(heads.value, slice(g * merged, (g + 1) * merged), turn)
        into.turn(places, as_rows)
        rows += places[r:].tolist()
        backs = space.back(r)
        ways = []
        for i, back in enumerate(backs):
            h, member = g * merged * heads.groups + i, i // heads.groups
            back = back[member * d : (member + 1) * d]
            part, mean = slice(h * d, (h + 1) * d), spaces.mean[h]
            old = out.weight[:, part].clone()
            moved += old @ (mean[member * d : (member + 1) * d] - back @ (space.basis[:r] @ mean))
            if merged == 1:
                out.weight[:, part] = torch.cat([old @ back, torch.zeros(len(old), d - r, dtype=old.dtype)], 1)
                columns += range(h * d + r, (h + 1) * d)
            ways.append(back)
        ups.append(torch.stack(ways))
    if out.bias is not None or bias:
        out.bias = moved if out.bias is None else out.bias + moved
    into.store()
    out.store()
    return into.zero_rows(rows) + out.zero_columns(columns), ups if merged > 1 else []


def cut_keys(model: nn.Module, spaces: Spaces, kept: Kept) -> list[Fact]:
    heads = spaces.heads
    if heads.query is None or heads.key is None:
        return []  # behind a norm, say: the places go when the cache is packed
    queries = LinearMap(model, heads.query.module)
    keys = queries if heads.key.module == heads.query.module else LinearMap(model, heads.key.module)
    gone: dict[int, list[int]] = {id(queries): [], id(keys): []}
    for g in range(heads.key_heads):
        places = key_places(spaces, g, kept)
        dropped = sorted(set(range(heads.d_qk)) - set(places))
        if not dropped:
            continue
        on_keys, on_queries = key_turns(spaces, g, kept)
        rows, turn = in_rows(heads.key, g, on_keys)
        keys.turn(rows, turn)
        gone[id(keys)] += rows[dropped].tolist()
        for i, change in enumerate(on_queries):
            rows, turn = in_rows(heads.query, g * heads.groups + i, change)
            queries.turn(rows, turn)
            gone[id(queries)] += rows[dropped].tolist()
    facts = []
    for layer in {id(queries): queries, id(keys): keys}.values():
        layer.store()
        facts += layer.zero_rows(gone[id(layer)])
    return facts


def join_keys(model: nn.Module, spaces: Spaces, kept: Kept) -> list[Fact]:
    """The rows of the keys make what joined heads share: the i-th number of a plane where head i had its own."""
    heads, joined, size = spaces.heads, spaces.joined, spaces.heads.d_qk
    assert heads.key is not None and heads.query is not None
    layer = LinearMap(model, heads.key.module)
    gone: list[int] = []
    for g, (still, planes) in enumerate(zip(spaces.still, spaces.planes, strict=True)):
        turn = torch.zeros(joined * size, joined * size, dtype=torch.float64)
        if still is not None:
            at = torch.tensor(spaces.still_places)
            turn[at[:, None], at] = still.basis
        if isinstance(planes, Joined):
            heads_at = size * torch.arange(joined)
            for mix, (a, b) in zip(planes.mix, heads.planes, strict=True):
                first, second = heads_at + a, heads_at + b
                turn[first[:, None], first] = turn[second[:, None], second] = mix.real
                turn[first[:, None], second], turn[second[:, None], first] = -mix.imag, mix.imag
        dropped = sorted(set(range(joined * size)) - set(key_places(spaces, g, kept)))
        turn[dropped] = 0.0
        rows, as_rows = in_rows(heads.key, slice(g * joined, (g + 1) * joined), turn)
        layer.turn(rows, as_rows)
        gone += rows[dropped].tolist()
    layer.store()
    return layer.zero_rows(gone) + ([] if spaces.late else unasked(model, spaces, kept))


def unasked(model: nn.Module, spaces: Spaces, kept: Kept) -> list[Fact]:
    """Rows of queries that meet nothing any more: of planes of which no number is kept."""
    heads, joined = spaces.heads, spaces.joined
    assert heads.query is not None
    layer = LinearMap(model, heads.query.module)
    gone: list[int] = []
    for g in range(heads.key_heads // joined):
        met = {n // joined for n in numbers_kept(spaces, g, kept)}
        places = [place for p, plane in enumerate(heads.planes) if p not in met for place in plane]
        shared = heads.groups * joined
        gone += heads.query.places[g * shared : (g + 1) * shared, places].flatten().tolist()
    layer.weight[gone] = 0.0
    if layer.bias is not None:
        layer.bias[gone] = 0.0
    layer.store()
    return layer.zero_rows(gone)


def asks(spaces: Spaces, kept: Kept) -> dict[str, Tensor]:
    """What queries become to meet joined keys: a map of still places, a complex factor for every number kept.

    q meets u·Dk as ūq meets Dk: with ū = α − iβ the plane (a, b) becomes (αa + βb, αb − βa).
    """
    heads, joined = spaces.heads, spaces.joined
    found: dict[str, Tensor] = {}
    places: list[int] = []
    turns: list[Tensor] = []
    for g, (still, planes) in enumerate(zip(spaces.still, spaces.planes, strict=True)):
        if still is not None:
            own = own_parts(heads, joined, len(heads.still))[: heads.groups * joined]
            back = still.back(kept.still[g])
            found[f"ask_{g}"] = torch.stack([way[part] for way, part in zip(back, own, strict=True)])
        if isinstance(planes, Joined):
            reads = planes.reads(kept.planes[g])
            turns.append(torch.stack([reads.real, reads.imag], 1).flatten())
        numbers = numbers_kept(spaces, g, kept)
        places += [heads.planes[n // joined][side] for side in range(2) for n in numbers]
    if turns:
        found["turn"] = torch.cat(turns)
    if places:
        found["query_places"] = torch.tensor(places, dtype=torch.int32)
        if heads.still:
            found["still_places"] = torch.tensor(heads.still, dtype=torch.int32)
    return found


def expansions(spaces: Spaces, kept: Kept) -> dict[str, Tensor]:
    """What makes whole keys of those that are cached before positions: a map, a constant, and how to turn them."""
    assert spaces.late is not None
    maps: list[Tensor] = []
    shifts: list[Tensor] = []
    for g, space in enumerate(spaces.still):
        assert space is not None
        r, mean = kept.still[g], spaces.late.mean[g]
        back = space.back(r)[0]
        maps.append(back.flatten())
        shifts.append(spaces.late.scale * (mean - back @ (space.basis[:r] @ mean)))
    places = [plane[side] for side in range(2) for plane in spaces.heads.planes]
    return {
        "expand": torch.cat(maps),
        "shift": torch.stack(shifts).unflatten(1, (spaces.joined, -1)),
        "plane_places": torch.tensor(places, dtype=torch.int32),
        "rates": spaces.late.rates.float().view(torch.int32),  # bits: no change of precision may touch them
        **({"still_places": torch.tensor(spaces.heads.still, dtype=torch.int32)} if spaces.heads.still else {}),
    }


def own_parts(heads: Heads, merged: int, size: int) -> list[slice]:
    """Where each query head's own places lie among those of the heads that its key head is merged with."""
    members = [h // heads.groups % merged for h in range(heads.heads)]
    return [slice(m * size, (m + 1) * size) for m in members]


def key_turns(spaces: Spaces, head: int, kept: Kept) -> tuple[Tensor, list[Tensor]]:
    """The map of a head's keys, and that of each of its query heads: zero in the places that are dropped."""
    heads, still, planes = spaces.heads, spaces.still[head], spaces.planes[head]
    assert not isinstance(planes, Joined)
    size = heads.d_qk
    keys = torch.zeros(size, size, dtype=torch.float64)
    queries = [keys.clone() for _ in range(heads.groups)]
    at = torch.tensor(heads.still, dtype=torch.long)
    r = kept.still[head]
    for change, i in [(keys, -1), *((q, i) for i, q in enumerate(queries))]:
        if still is None or r == len(heads.still):
            change[at, at] = 1.0
        elif i < 0:
            change[at[:r, None], at] = still.basis[:r]
        else:
            change[at[:r, None], at] = still.back(r)[i].T
    chosen = range(len(heads.planes)) if planes is None else planes.kept(kept.planes[head])
    for p in chosen:
        a, b = heads.planes[p]
        keys[a, a] = keys[b, b] = 1.0
        for i, change in enumerate(queries):
            along, across = (0.0, 0.0) if planes is None else planes.change[kept.planes[head]][i, :, p].tolist()
            change[a, a] = change[b, b] = 1.0 + along
            change[a, b], change[b, a] = -across, across
    return keys, queries


@dataclass(frozen=True)
class Cut:
    """A model with its heads cut: dense, with zeros where nothing is kept; and what a slim form may leave out."""

    module: nn.Module
    facts: tuple[Fact, ...]
    packings: dict[str, dict[str, Any]]


def cut(
    model: nn.Module,
    spaces: Sequence[Spaces],
    kept: Mapping[str, Kept],
    *,
    bias: bool,
    precision: torch.dtype | None = None,
) -> Cut:
    """A copy of the model with every attention truncated; what is left as it was is shared with the original.

    New weights have the precision of the old ones, or the one that is given.
    """
    module = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # new weights take the place of old ones
    if precision is not None:
        for layer in {module.get_submodule(path) for s in spaces for path in s.heads.layers}:
            for name, p in list(layer.named_parameters(recurse=False)):
                if p.dtype != precision:  # else it would be another parameter with the same numbers
                    layer.register_parameter(name, nn.Parameter(p.detach().to(precision), p.requires_grad))
    facts: list[Fact] = []
    packings = {}
    for s in spaces:
        found, packings[s.heads.path] = truncate(module, s, kept[s.heads.path], bias=bias)
        facts += found
    return Cut(module, tuple(facts), packings)
