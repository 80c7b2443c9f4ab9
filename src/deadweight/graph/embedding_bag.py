"""EmbeddingBag: rows of a table, added or averaged bag by bag."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.graph.node import Node, Operation, Ref
from deadweight.graph.operations import EMBEDDING, MATMUL
from deadweight.graph.rewriting import Canonicaliser, arguments_as, rewrites

SUM, MEAN = 0, 1


@dataclass(frozen=True)
class EmbeddingBag:
    """What an EmbeddingBag is given, by the names of its schema."""

    weight: Ref
    indices: Ref
    offsets: Ref
    mode: int = SUM
    per_sample_weights: Ref | None = None
    include_last_offset: bool = False
    padding_idx: int | None = -1


@dataclass(frozen=True)
class Weighting:
    """How rows are weighted: averaged or summed, whether the last offset is the end, and which index is padding."""

    mean: bool
    last_is_end: bool
    padding: int | None


@rewrites("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def weigh_rows(make: Canonicaliser, node: Node) -> tuple[Ref, ...] | None:
    """A bag's vector is Σ w·row, with weights that depend on the indices alone: a product with the rows looked up.

    The maximum over rows is no such sum. Neither are the other results of the operation; where one of them is read,
    the operation stays as it is.
    """
    bag = arguments_as(EmbeddingBag, node)
    results_read = {user.args[1] for user in make.old.users[node.name] if user.name in make.old.live}
    if bag.mode not in (SUM, MEAN) or results_read != {0} or len(make.shape(bag.indices)) != 1:
        return None
    like, (n_offsets,), (n_rows,) = make.nodes[bag.weight.name], make.shape(bag.offsets), make.shape(bag.indices)
    n_bags, width = n_offsets - int(bag.include_last_offset), like.shape[1]
    rows = make.emit(f"{node.name}_rows", EMBEDDING, (bag.weight, bag.indices), (n_rows, width), like)
    weighting = Weighting(bag.mode == MEAN, bool(bag.include_last_offset), bag.padding_idx)
    args = (bag.indices, bag.offsets, bag.per_sample_weights, weighting)
    weights = make.emit(f"{node.name}_weights", BAG_WEIGHTS, args, (n_bags, n_rows), like)
    return (make.emit(f"{node.name}_vectors", BAG, (weights, rows), (n_bags, width), like),)


def bag_weights(indices: Tensor, offsets: Tensor, per_sample: Tensor | None, weighting: Weighting) -> Tensor:
    """(bags, rows): the weight of every row that is looked up in each bag."""
    n_bags = len(offsets) - int(weighting.last_is_end)
    starts = offsets[:n_bags].contiguous()
    bag = torch.searchsorted(starts, torch.arange(len(indices)), right=True).sub(1).clamp_min(0)
    weights = torch.nn.functional.one_hot(bag, n_bags).T.to(torch.get_default_dtype())
    if weighting.padding is not None and weighting.padding >= 0:
        weights = weights * (indices != weighting.padding)
    if per_sample is not None:
        weights = weights * per_sample
    return weights / weights.sum(1, keepdim=True).clamp_min(1) if weighting.mean else weights


BAG_WEIGHTS = Operation("bag_weights", bag_weights)
BAG = Operation("bag", MATMUL.target)
