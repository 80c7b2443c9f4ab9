"""Truncating heads: new weights with zeros in the dropped dimensions, and which of them need not be stored.

All changes are products with rows and columns, in float64. Keys and values change to the basis in which their first
dimensions matter most; queries and output projection absorb the regressions; means go into the output bias.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deadweight.compress.linear_map import LinearMap, has_bias, on_rows
from deadweight.compress.locate import Heads
from deadweight.compress.rotary_pairs import PairSpace
from deadweight.compress.subspace import Subspace
from deadweight.save.facts import Fact
from deadweight.slim.format import HeadsSpec


@dataclass(frozen=True)
class HeadSpaces:
    """What every key head of one attention can drop, and the predicted loss: dimensions of its values, non-rotary
    dimensions and rotary pairs of its keys. None: nothing can be dropped."""

    heads: Heads
    mean: Tensor  # of the output of every query head, (h, d_v)
    values: tuple[Subspace | None, ...]
    non_rotary: tuple[Subspace | None, ...]
    pairs: tuple[PairSpace | None, ...]

    def key_dimensions(self, head: int, kept: KeptDimensions) -> list[int]:
        """The dimensions of a key head that its keys keep."""
        heads, space = self.heads, self.pairs[head]
        pairs = range(len(heads.rotary_pairs)) if space is None else space.kept(kept.pairs[head])
        return sorted([*heads.non_rotary[: kept.non_rotary[head]], *(d for p in pairs for d in heads.rotary_pairs[p])])


@dataclass(frozen=True)
class KeptDimensions:
    """How much every key head of one attention keeps."""

    values: tuple[int, ...]
    non_rotary: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """Dimensions of the keys of every key head."""
        return tuple(n + 2 * p for n, p in zip(self.non_rotary, self.pairs, strict=True))


def kept_whole(heads: Heads) -> KeptDimensions:
    """All dimensions of every head."""
    sizes = (heads.d_v, len(heads.non_rotary), len(heads.rotary_pairs))
    values, non_rotary, pairs = ((size,) * heads.key_heads for size in sizes)
    return KeptDimensions(values, non_rotary, pairs)


@dataclass(frozen=True)
class TruncatedHeads:
    """One attention after truncation: how its heads are packed, and which dimensions of keys are kept."""

    spec: HeadsSpec
    key_dimensions: Tensor  # of all key heads, one after the other
    new_bias: str | None  # the output projection, if it was given a bias


@dataclass(frozen=True)
class TruncatedModel:
    """A model with truncated heads: dense, with zeros in dropped dimensions; and what a slim form need not store."""

    module: nn.Module
    facts: tuple[Fact, ...]
    heads: dict[str, TruncatedHeads]


def truncate_model(
    model: nn.Module,
    spaces: Sequence[HeadSpaces],
    kept: Mapping[str, KeptDimensions],
    *,
    bias: bool,
    precision: torch.dtype | None = None,
) -> TruncatedModel:
    """A copy of the model with every attention truncated; unchanged weights are shared with the original.

    With `bias`, output projections without a bias may get one. New weights have the precision of the old ones, or the
    given one.
    """
    module = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # new weights take the place of old ones
    if precision is not None:
        for layer in {module.get_submodule(path) for s in spaces for path in s.heads.layers}:
            for name, p in list(layer.named_parameters(recurse=False)):
                if p.dtype != precision:  # else it would be another parameter with the same numbers
                    layer.register_parameter(name, nn.Parameter(p.detach().to(precision), p.requires_grad))
    facts: list[Fact] = []
    heads = {}
    for s in spaces:
        zeros, heads[s.heads.path] = truncate_heads(module, s, kept[s.heads.path], bias=bias)
        facts += zeros
    return TruncatedModel(module, tuple(facts), heads)


def truncate_heads(
    model: nn.Module, spaces: HeadSpaces, kept: KeptDimensions, *, bias: bool
) -> tuple[list[Fact], TruncatedHeads]:
    """Truncate one attention in place. Returns the facts about its zeros, and how its heads are packed."""
    heads = spaces.heads
    had_bias = has_bias(model, heads.output)
    facts = truncate_values(model, spaces, kept, bias=bias) + truncate_keys(model, spaces, kept)
    dimensions = [spaces.key_dimensions(g, kept) for g in range(heads.key_heads)]
    spec = HeadsSpec(
        heads.heads,
        heads.key_heads,
        heads.d_qk,
        heads.d_v,
        keys=tuple(map(len, dimensions)),
        values=kept.values,
        listed=any(head != list(range(len(head))) for head in dimensions),
    )
    listed = torch.tensor([d for head in dimensions for d in head], dtype=torch.int32)
    new_bias = heads.output if has_bias(model, heads.output) and not had_bias else None
    return facts, TruncatedHeads(spec, listed, new_bias)


def truncate_values(model: nn.Module, spaces: HeadSpaces, kept: KeptDimensions, *, bias: bool) -> list[Fact]:
    """Change values to their best basis and keep its first dimensions; the output projection undoes the change."""
    heads, d = spaces.heads, spaces.heads.d_v
    if heads.value is None or heads.output is None or all(r == d for r in kept.values):
        return []
    into, out = LinearMap(model, heads.value.module), LinearMap(model, heads.output)
    rows: list[int] = []
    columns: list[int] = []
    shift = torch.zeros(out.weight.shape[0], dtype=torch.float64)  # of outputs, by the means of what is dropped
    for g, (space, r) in enumerate(zip(spaces.values, kept.values, strict=True)):
        if space is None or r == d:
            continue
        change = torch.zeros(d, d, dtype=torch.float64)
        change[:r] = space.basis[:r]
        at, matrix = on_rows(heads.value, g, change)
        into.transform(at, matrix)
        rows += at[r:].tolist()
        for h, back in enumerate(space.back(r), start=g * heads.groups):
            part, mean = slice(h * d, (h + 1) * d), spaces.mean[h]
            old = out.weight[:, part].clone()
            shift += old @ (mean - back @ (space.basis[:r] @ mean))
            out.weight[:, part] = torch.cat([old @ back, torch.zeros(len(old), d - r, dtype=old.dtype)], 1)
            columns += range(h * d + r, (h + 1) * d)
    if out.bias is not None or bias:
        out.bias = shift if out.bias is None else out.bias + shift
    into.store()
    out.store()
    return into.zero_rows(rows) + out.zero_columns(columns)


def truncate_keys(model: nn.Module, spaces: HeadSpaces, kept: KeptDimensions) -> list[Fact]:
    """Set keys and queries to zero in the dropped dimensions."""
    heads = spaces.heads
    if heads.query is None or heads.key is None:
        return []
    queries = LinearMap(model, heads.query.module)
    keys = queries if heads.key.module == heads.query.module else LinearMap(model, heads.key.module)
    layers = {id(layer): layer for layer in (queries, keys)}
    zero: dict[int, list[int]] = {name: [] for name in layers}
    for g in range(heads.key_heads):
        dropped = sorted(set(range(heads.d_qk)) - set(spaces.key_dimensions(g, kept)))
        if not dropped:
            continue
        on_keys, on_queries = key_changes(spaces, g, kept)
        sides = [(keys, heads.key, g, on_keys)]
        sides += [(queries, heads.query, g * heads.groups + i, change) for i, change in enumerate(on_queries)]
        for layer, side, head, change in sides:
            rows, matrix = on_rows(side, head, change)
            layer.transform(rows, matrix)
            zero[id(layer)] += rows[dropped].tolist()
    facts = []
    for name, layer in layers.items():
        layer.store()
        facts += layer.zero_rows(zero[name])
    return facts


def key_changes(spaces: HeadSpaces, head: int, kept: KeptDimensions) -> tuple[Tensor, list[Tensor]]:
    """The transform of a head's keys and those of its query heads: zero in dropped dimensions."""
    heads, space, pairs = spaces.heads, spaces.non_rotary[head], spaces.pairs[head]
    keys = torch.zeros(heads.d_qk, heads.d_qk, dtype=torch.float64)
    queries = [keys.clone() for _ in range(heads.groups)]
    at, r = torch.tensor(heads.non_rotary, dtype=torch.long), kept.non_rotary[head]
    if space is None or r == len(heads.non_rotary):
        for change in (keys, *queries):
            change[at, at] = 1.0
    else:
        keys[at[:r, None], at] = space.basis[:r]
        for change, back in zip(queries, space.back(r), strict=True):
            change[at[:r, None], at] = back.T
    for p in range(len(heads.rotary_pairs)) if pairs is None else pairs.kept(kept.pairs[head]):
        a, b = heads.rotary_pairs[p]
        keys[a, a] = keys[b, b] = 1.0
        for i, change in enumerate(queries):
            stretch, turn = (0.0, 0.0) if pairs is None else pairs.change[kept.pairs[head]][i, :, p].tolist()
            change[a, a] = change[b, b] = 1.0 + stretch
            change[a, b], change[b, a] = -turn, turn
    return keys, queries
