"""The number of weights per dimension of a head, and how many dimensions each head keeps within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from deadweight.compress.knapsack import Choice, best_sizes, same_share
from deadweight.compress.locate import Heads
from deadweight.compress.rotary_pairs import PairSpace
from deadweight.compress.subspace import Subspace
from deadweight.compress.truncate import HeadSpaces, KeptDimensions, kept_whole
from deadweight.errors import DeadweightError

Method = Literal["knapsack", "layer", "uniform"]
Kind = Literal["values", "non_rotary", "pairs"]


@dataclass(frozen=True)
class PricedSpace:
    """One space of an attention, and the weights that each of its dimensions takes."""

    path: str
    kind: Kind
    head: int
    choice: Choice
    whole: int  # its size at present
    cost: int  # weights of one of its units, a dimension or a pair


@dataclass(frozen=True)
class Ranks:
    """What every key head of every attention keeps, and the predicted loss."""

    kept: dict[str, KeptDimensions]
    predicted: float  # nats per token, or relative squared error
    share: float  # of the attention weights


def priced_spaces(spaces: HeadSpaces, model: nn.Module, step: int) -> list[PricedSpace]:
    """Every space of one attention as a choice of sizes, which are multiples of `step` dimensions."""
    heads = spaces.heads
    kinds: tuple[tuple[Kind, Sequence[Subspace | PairSpace | None], int, int], ...] = (
        ("values", spaces.values, heads.d_v, 1),
        ("non_rotary", spaces.non_rotary, len(heads.non_rotary), 1),
        ("pairs", spaces.pairs, len(heads.rotary_pairs), 2),
    )
    priced = []
    for kind, members, whole, unit in kinds:
        for head, space in enumerate(members):
            if space is None or whole == 0:
                continue
            cost = unit * (value_weights(heads, model) if kind == "values" else key_weights(heads, model))
            every = max(1, step // unit)
            sizes = tuple(sorted({*range(every, whole, every), whole}))
            losses = space.loss.clamp(min=0).flip(0).cummax(0).values.flip(0)  # never better with less
            choice = Choice(sizes, tuple(s * cost for s in sizes), tuple(float(losses[s]) for s in sizes))
            priced.append(PricedSpace(heads.path, kind, head, choice, whole, cost))
    return priced


def inputs_of(model: nn.Module, path: str) -> int:
    module: Any = model.get_submodule(path)
    return int(getattr(module, "in_features", getattr(module, "nx", 0)))


def value_weights(heads: Heads, model: nn.Module) -> int:
    """Weights of one value dimension of a key head: a row of values, and a column for each of its query heads."""
    assert heads.value is not None and heads.output is not None
    out: Any = model.get_submodule(heads.output)
    columns = int(getattr(out, "out_features", getattr(out, "nf", 0)))
    return inputs_of(model, heads.value.module) + heads.groups * columns


def key_weights(heads: Heads, model: nn.Module) -> int:
    """Weights of one key dimension of a key head: a row of keys, and one for each of its query heads."""
    assert heads.key is not None and heads.query is not None
    return inputs_of(model, heads.key.module) + heads.groups * inputs_of(model, heads.query.module)


def choose_ranks(
    priced: Sequence[PricedSpace], attentions: Sequence[Heads], share: float, total: int, method: Method
) -> Ranks:
    """The sizes with the least predicted loss within a share of the total. What cannot be dropped counts as kept."""
    fixed = total - sum(s.whole * s.cost for s in priced)
    room = int(share * total + 1e-9) - fixed
    choices = [s.choice for s in priced]
    least = fixed + sum(min(c.costs) for c in choices)
    if room < least - fixed:
        raise DeadweightError(
            f"found --keep-attention {share}; the least that these heads can be cut to is "
            f"{math.ceil(1000 * least / max(total, 1)) / 1000}"
        )
    if method == "knapsack":
        sizes, loss = best_sizes(choices, room)
    elif method == "uniform":
        sizes, loss = same_share(choices, room)
    else:
        sizes, loss = best_by_layer(priced, room)
    kept = {heads.path: kept_whole(heads) for heads in attentions}
    for one, size in zip(priced, sizes, strict=True):
        now = list(getattr(kept[one.path], one.kind))
        now[one.head] = size
        kept[one.path] = replace(kept[one.path], **{one.kind: tuple(now)})
    spent = fixed + sum(size * one.cost for one, size in zip(priced, sizes, strict=True))
    return Ranks(kept, loss, spent / max(total, 1))


def best_by_layer(priced: Sequence[PricedSpace], room: int) -> tuple[tuple[int, ...], float]:
    """One choice per layer and kind: all heads of a layer keep the same number."""
    groups: dict[tuple[str, str], list[PricedSpace]] = {}
    for one in priced:
        groups.setdefault((one.path, one.kind), []).append(one)
    choices = [
        Choice(
            members[0].choice.sizes,
            tuple(sum(c) for c in zip(*(m.choice.costs for m in members), strict=True)),
            tuple(sum(x) for x in zip(*(m.choice.losses for m in members), strict=True)),
        )
        for members in groups.values()
    ]
    sizes, loss = best_sizes(choices, room)
    chosen = dict(zip(groups, sizes, strict=True))
    return tuple(chosen[one.path, one.kind] for one in priced), loss


def attention_weights(attentions: Sequence[Heads], model: nn.Module) -> int:
    """The weights of all attentions."""

    def count(heads: Heads) -> int:
        return sum(model.get_submodule(path).get_parameter("weight").numel() for path in dict.fromkeys(heads.layers))

    return sum(map(count, attentions))


def cached_numbers(attentions: Sequence[Heads]) -> int:
    """Keys and values of one token."""
    return sum(heads.key_heads * (heads.d_qk + heads.d_v) for heads in attentions)
