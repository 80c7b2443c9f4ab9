"""EmbeddingBag: rows of a table, added or averaged bag by bag."""

from __future__ import annotations

import torch
from torch import Tensor

from deadweight.graph.node import Node, Ref
from deadweight.graph.rewriting import Canonicaliser, by_name, rewrites

aten = torch.ops.aten
SUM, MEAN = 0, 1


@rewrites("aten.embedding_bag", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def weighted_rows(make: Canonicaliser, node: Node) -> tuple[Ref, ...] | None:
    """A bag's vector is Σ w·row, with weights that the indices alone decide: a product with the rows that are read.

    The largest of the rows is no such sum. Neither are the other results of the operation; where one of them is read
    (the last ones say which row is in which bag), it stays as it is.
    """
    given = by_name(node)
    read = {user.args[1] for user in make.old.users[node.name] if user.name in make.old.live}
    table, indices, offsets = given["weight"], given["indices"], given["offsets"]
    mode = given.get("mode", SUM)
    if mode not in (SUM, MEAN) or read != {0} or len(make.shape(indices)) != 1:
        return None
    like, (bags,), (count,) = make.nodes[table.name], make.shape(offsets), make.shape(indices)
    bags -= int(bool(given.get("include_last_offset")))
    rows = make.emit(
        f"{node.name}_rows",
        "aten.embedding",
        aten.embedding.default,
        (table, indices),
        (count, like.shape[1]),
        like,
    )
    args = (indices, offsets, given.get("per_sample_weights"), mode == MEAN, bags, given.get("padding_idx", -1))
    weights = make.emit(f"{node.name}_weights", "bag_weights", bag_weights, args, (bags, count), like)
    vectors = make.emit(
        f"{node.name}_vectors", "bag", aten.matmul.default, (weights, rows), (bags, like.shape[1]), like
    )
    return (vectors,)


def bag_weights(
    indices: Tensor, offsets: Tensor, given: Tensor | None, mean: bool, bags: int, padding: int | None
) -> Tensor:
    """(bags, rows): how much of every row that is looked up goes into each bag."""
    starts = offsets[:bags].contiguous()
    bag = torch.searchsorted(starts, torch.arange(len(indices)), right=True).sub(1).clamp_min(0)
    weights = torch.nn.functional.one_hot(bag, bags).T.to(torch.get_default_dtype())
    if padding is not None and padding >= 0:
        weights = weights * (indices != padding)
    if given is not None:
        weights = weights * given
    return weights / weights.sum(1, keepdim=True).clamp_min(1) if mean else weights
