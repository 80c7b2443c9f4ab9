"""From measured heads and a budget to how much each of them keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deadweight.compress.joined import Joined, best_joined, moment_of_product
from deadweight.compress.late import rates_of
from deadweight.compress.locate import Heads
from deadweight.compress.moments import Moments
from deadweight.compress.planes import Planes, best_planes
from deadweight.compress.ranks import Choice, best_sizes, same_share
from deadweight.compress.subspace import Subspace, best_subspace, orthogonal
from deadweight.compress.truncate import Kept, Late, LinearMap, Spaces, own_parts
from deadweight.errors import DeadweightError

Method = Literal["knapsack", "layer", "uniform"]


@dataclass(frozen=True)
class Budget:
    """What is limited, and to which share of what there is."""

    what: Literal["kv", "attention"]
    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise DeadweightError(f"found --keep-{self.what} {self.share}; expected a share above 0 and at most 1")


Kind = Literal["values", "still", "planes"]


@dataclass(frozen=True)
class Slot:
    """One space of an attention, and what each of its dimensions costs."""

    path: str
    kind: Kind
    index: int
    choice: Choice
    whole: int  # its size at present
    cost: int  # of one of its units


def spaces_of(heads: Heads, moments: Moments, model: nn.Module, *, bias: bool = True) -> Spaces:
    """The best bases and planes of one attention, for every number of kept dimensions.

    Means are left to a bias behind the heads, if there is one or, with `bias`, may be.
    """
    moments = moments.mean()
    merged, joined, mean = moments.merged, moments.joined, moments.out_mean
    if not bias and (heads.output is None or LinearMap(model, heads.output).bias is None):
        mean = torch.zeros_like(mean)
    centred = moments.out - mean[:, :, None] * mean[:, None, :]
    both = heads.query is not None and heads.key is not None and not heads.blind
    values: list[Subspace | None] = [None] * (heads.key_heads // merged)
    if heads.value is not None and heads.output is not None:
        gradient = placed(steadied(moments.out_gradient, centred, heads, merged, model), heads, merged)
        values = [best_subspace(centred[g], gradient[g]) for g in sharing(heads, merged)]
    still: list[Subspace | None] = [None] * (heads.key_heads // joined)
    if moments.late:
        varied = moments.key - moments.key_mean[:, :, None] * moments.key_mean[:, None, :]
        still = [orthogonal(best_subspace(k[None], g[None])) for k, g in zip(varied, moments.key_gradient, strict=True)]
    elif both and heads.still:
        answer, asked = still_answers(moments), placed(moments.query, heads, joined)
        still = [orthogonal(best_subspace(answer[g], asked[g])) for g in sharing(heads, joined)]
    planes: list[Planes | Joined | None] = [None] * (heads.key_heads // joined)
    if heads.planes and not heads.blind and joined > 1 and not moments.late:
        members = torch.arange(heads.heads) // heads.groups % joined
        answer = plane_answers(moments)
        planes = [best_joined(answer[g], members[g], joined, moments.planes[g]) for g in sharing(heads, joined)]
    elif heads.planes and not heads.blind and joined == 1:
        planes = [best_planes(m, heads.groups, len(heads.planes), free=both) for m in moments.planes]
    late = Late(*rates_of(moments.turns, moments.sizes, heads.path), moments.key_mean) if moments.late else None
    return Spaces(heads, merged, joined, mean, tuple(values), tuple(still), tuple(planes), late)


def sharing(heads: Heads, count: int) -> list[slice]:
    """The query heads of every set of so many key heads."""
    return [slice(i, i + heads.groups * count) for i in range(0, heads.heads, heads.groups * count)]


def half_and_half(measured: Tensor, expected: Tensor) -> Tensor:
    """What was measured, half of it replaced by what would be expected, to the same scale.

    Gradients on some text leave out directions that other text needs.
    """
    scale = measured.diagonal(dim1=-2, dim2=-1).sum() / expected.diagonal(dim1=-2, dim2=-1).sum().clamp(min=1e-300)
    return 0.5 * (measured + scale * expected)


def still_answers(moments: Moments) -> Tensor:
    """The moments of the gradients of still places; of joined heads, half of it as if they were like any keys."""
    if moments.joined == 1:
        return moments.query_gradient
    varied = moments.key - moments.key_mean[:, :, None] * moments.key_mean[:, None, :]  # a constant key changes nothing
    return half_and_half(moments.query_gradient, per_query_head(varied, moments))


def plane_answers(moments: Moments) -> Tensor:
    """The same for planes."""
    expected = moment_of_product(moments.query_planes, per_query_head(moments.key_planes, moments))
    return half_and_half(moments.planes, expected)


def per_query_head(of_sets: Tensor, moments: Moments) -> Tensor:
    return of_sets.repeat_interleave(moments.heads.heads // len(of_sets), 0)


def steadied(gradient: Tensor, moment: Tensor, heads: Heads, merged: int, model: nn.Module) -> Tensor:
    """The moment of the gradients, half of it in place of what the output projection alone would weigh.

    Gradients on some text leave out directions that other text needs; what the weights amplify does not.
    """
    assert heads.output is not None
    weight = LinearMap(model, heads.output).weight.unflatten(1, (heads.heads, heads.d_v)).transpose(0, 1)
    weighed = weight.transpose(1, 2) @ weight
    own = torch.stack([moment[h][part, part] for h, part in enumerate(own_parts(heads, merged, heads.d_v))])
    scale = (gradient * own).sum() / (weighed * own).sum().clamp(min=1e-300)
    return 0.5 * (gradient + scale * weighed)


def placed(moment: Tensor, heads: Heads, merged: int) -> Tensor:
    """Moments of every head's own places in the space of all that are merged, zero outside them."""
    size = moment.shape[-1]
    found = torch.zeros(heads.heads, merged * size, merged * size, dtype=moment.dtype)
    for h, part in enumerate(own_parts(heads, merged, size)):
        found[h][part, part] = moment[h]
    return found


def slots_of(spaces: Spaces, model: nn.Module, what: str, step: int) -> list[Slot]:
    """Every space of one attention as a choice of sizes; those that cannot be cut are not among them."""
    heads = spaces.heads
    kinds: tuple[tuple[Kind, Sequence[Any], int, int], ...] = (
        ("values", spaces.values, spaces.merged * heads.d_v, 1),
        ("still", spaces.still, spaces.n_still, 1),
        ("planes", spaces.planes, spaces.n_planes, 2),
    )
    found = []
    for kind, members, whole, unit in kinds:
        for index, space in enumerate(members):
            if space is None or whole == 0:
                continue
            cost = unit * (1 if what == "kv" else weights_per_place(heads, model, kind))
            every = max(1, step // unit)
            sizes = tuple(sorted({*range(every, whole, every), whole}))
            losses = space.loss.clamp(min=0).flip(0).cummax(0).values.flip(0)  # never better with less
            choice = Choice(sizes, tuple(s * cost for s in sizes), tuple(float(losses[s]) for s in sizes))
            found.append(Slot(heads.path, kind, index, choice, whole, cost))
    return found


def weights_per_place(heads: Heads, model: nn.Module, kind: str) -> int:
    """Weights that go with one dimension of a key head: a row of keys and of each query, or of values and columns."""

    def inputs(path: str) -> int:
        module: Any = model.get_submodule(path)
        return int(getattr(module, "in_features", getattr(module, "nx", 0)))

    if kind == "values":
        assert heads.value is not None and heads.output is not None
        out: Any = model.get_submodule(heads.output)
        return inputs(heads.value.module) + heads.groups * int(getattr(out, "out_features", getattr(out, "nf", 0)))
    if heads.key is None or heads.query is None:
        return 0
    return inputs(heads.key.module) + heads.groups * inputs(heads.query.module)


@dataclass(frozen=True)
class Ranks:
    """What every key head of every attention keeps, and the loss that is predicted for it."""

    kept: dict[str, Kept]
    predicted: float  # nats per token, or relative squared error
    share: float  # of the budgeted quantity


def ranked(slots: Sequence[Slot], spaces: Sequence[Spaces], budget: Budget, total: int, method: Method) -> Ranks:
    """The sizes with the least predicted loss within the budget. What cannot be cut counts as kept."""
    fixed = total - sum(s.whole * s.cost for s in slots)
    room = int(budget.share * total + 1e-9) - fixed
    choices = [s.choice for s in slots]
    least = fixed + sum(min(c.costs) for c in choices)
    if room < least - fixed:
        raise DeadweightError(
            f"found --keep-{budget.what} {budget.share}; the least that these heads can be cut to is "
            f"{math.ceil(1000 * least / max(total, 1)) / 1000}"
        )
    if method == "knapsack":
        sizes, loss = best_sizes(choices, room)
    elif method == "uniform":
        sizes, loss = same_share(choices, room)
    else:
        sizes, loss = best_by_layer(slots, room)
    kept = {s.heads.path: whole(s) for s in spaces}
    spent = fixed
    for slot, size in zip(slots, sizes, strict=True):
        sizes_now = list(getattr(kept[slot.path], slot.kind))
        sizes_now[slot.index] = size
        kept[slot.path] = replace(kept[slot.path], **{slot.kind: tuple(sizes_now)})
        spent += size * slot.cost
    return Ranks(kept, loss, spent / max(total, 1))


def whole(spaces: Spaces) -> Kept:
    heads, merged, joined = spaces.heads, spaces.merged, spaces.joined
    values = (merged * heads.d_v,) * (heads.key_heads // merged)
    still, planes = ((n,) * (heads.key_heads // joined) for n in (spaces.n_still, spaces.n_planes))
    return Kept(values, still, planes)


def best_by_layer(slots: Sequence[Slot], room: int) -> tuple[tuple[int, ...], float]:
    """All heads of a layer keep the same: one choice per layer and kind."""
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.path, slot.kind), []).append(slot)
    merged = [
        Choice(
            members[0].choice.sizes,
            tuple(sum(c) for c in zip(*(m.choice.costs for m in members), strict=True)),
            tuple(sum(x) for x in zip(*(m.choice.losses for m in members), strict=True)),
        )
        for members in groups.values()
    ]
    sizes, loss = best_sizes(merged, room)
    chosen = dict(zip(groups, sizes, strict=True))
    return tuple(chosen[slot.path, slot.kind] for slot in slots), loss


def total_cost(spaces: Sequence[Spaces], model: nn.Module, what: str) -> int:
    """All of what is budgeted: numbers in the cache per token, or weights of the attentions."""
    if what == "kv":
        return sum(s.heads.key_heads * (s.heads.d_qk + s.heads.d_v) for s in spaces)
    return sum(attention_weights(s.heads, model) for s in spaces)


def attention_weights(heads: Heads, model: nn.Module) -> int:
    sides = {side.module: side for side in (heads.query, heads.key, heads.value) if side is not None}
    paths = {*sides, *([heads.output] if heads.output else [])}
    return sum(model.get_submodule(path).get_parameter("weight").numel() for path in paths)
