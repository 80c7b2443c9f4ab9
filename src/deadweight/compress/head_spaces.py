"""Which dimensions and rotary pairs the heads of an attention can drop, and the predicted loss of each choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deadweight.compress.head_moments import HeadMoments
from deadweight.compress.linear_map import LinearMap, has_bias
from deadweight.compress.locate import Heads
from deadweight.compress.rotary_pairs import PairSpace, best_pairs
from deadweight.compress.subspace import Subspace, best_subspace, orthogonal
from deadweight.compress.truncate import HeadSpaces


def find_head_spaces(heads: Heads, moments: HeadMoments, model: nn.Module, *, bias: bool = True) -> HeadSpaces:
    """The best basis and the best rotary pairs of every key head, for every number of kept dimensions, from averages.

    Means go into the bias of the output projection, if it has one or, with `bias`, may get one. Keys behind a norm stay
    whole: dropping some of them would save no weights.
    """
    mean = moments.out_mean if bias or has_bias(model, heads.output) else torch.zeros_like(moments.out_mean)
    groups = [slice(i, i + heads.groups) for i in range(0, heads.heads, heads.groups)]
    values: list[Subspace | None] = [None] * heads.key_heads
    if heads.value is not None and heads.output is not None:
        centred = moments.out - mean[:, :, None] * mean[:, None, :]
        gradient = steady_gradient(moments.out_gradient, centred, LinearMap(model, heads.output))
        values = [best_subspace(centred[g], gradient[g]) for g in groups]
    non_rotary: list[Subspace | None] = [None] * heads.key_heads
    pairs: list[PairSpace | None] = [None] * heads.key_heads
    if can_drop_keys(heads) and heads.non_rotary:
        non_rotary = [orthogonal(best_subspace(moments.query_gradient[g], moments.query[g])) for g in groups]
    if can_drop_keys(heads) and heads.rotary_pairs:
        pairs = [best_pairs(moment, heads.groups, len(heads.rotary_pairs)) for moment in moments.pairs]
    return HeadSpaces(heads, mean, tuple(values), tuple(non_rotary), tuple(pairs))


def can_drop_keys(heads: Heads) -> bool:
    """Whether queries and keys are outputs of linear layers that were located."""
    return heads.query is not None and heads.key is not None and not heads.keys_unclear


def steady_gradient(gradient: Tensor, moment: Tensor, output: LinearMap) -> Tensor:
    """The second moment of the gradients, half of it replaced by the output projection's own Gram matrix.

    Gradients on one text miss directions that other text needs; the weights do not.
    """
    weight = output.weight.unflatten(1, moment.shape[:2]).transpose(0, 1)
    expected = weight.transpose(1, 2) @ weight
    scale = (gradient * moment).sum() / (expected * moment).sum().clamp(min=1e-300)
    return 0.5 * (gradient + scale * expected)


def reasons_left_whole(spaces: HeadSpaces) -> list[str]:
    """Why some of the dimensions of an attention cannot be dropped."""
    heads = spaces.heads
    reasons = [heads.keys_unclear] if heads.keys_unclear else []
    if spaces.values[0] is None:
        reasons.append("its values are not made by a linear layer, or not read by one")
    if not heads.keys_unclear and not can_drop_keys(heads):
        reasons.append("its queries or keys pass a norm, and stay whole")
    return reasons
