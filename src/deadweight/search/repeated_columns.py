"""DW017 inside one matrix: columns that read the same number are one column.

W·(v, v) = (A + B)·v: any C can move from A to B. So it is with the first mixing weights of hyper-connections, which
read several copies of the embedding, and with `cat([x, x])`. Needs that the copies are equal in every vector that the
matrix reads, whatever the input and the parameters are, and that the matrix is read there alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values
from deadweight.claims.shift_claim import FAR, ShiftClaim
from deadweight.graph.node import Node
from deadweight.proof.identity_labels import LARGE
from deadweight.proof.labels import compact
from deadweight.proof.steps import Step
from deadweight.proof.weights import WeightView, uses_of, weight_view
from deadweight.search.prover import Prover


@dataclass(frozen=True, kw_only=True)
class RepeatedColumnsClaim(Claim):
    """The columns at `index` may move by C if those at `first`, which read the same numbers, move by −C."""

    first: Int64[Tensor, " columns"]

    def motions(self, point: Point) -> Iterator[Motion]:
        rows = point.values[self.node].shape[1 - self.axis]
        assert self.index is not None
        for amounts in torch.eye(rows * len(self.index), dtype=torch.float64):
            yield self.along(point, amounts.reshape(rows, -1))

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        assert self.index is not None
        return self.along(point, normal(generator, point.values[self.node].shape[1 - self.axis], len(self.index)))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """The motion is linear: a long way along it is as good as a short one."""
        return {n: point.values[n] + FAR * t for n, t in self.direction(point, generator).items()}

    def along(self, point: Point, amounts: Tensor) -> Motion:
        assert self.index is not None
        moved = torch.zeros_like(point.values[self.node], dtype=torch.float64)
        columns = moved if self.axis == 1 else moved.T
        columns.index_add_(1, self.index, amounts)
        columns.index_add_(1, self.first, -amounts)
        return {self.node: moved}


def find_repeated_columns(prover: Prover, law: Title) -> Iterator[RepeatedColumnsClaim]:
    taken = {c.node for c in prover.claims if c.whole or isinstance(c, ShiftClaim)}
    for node in prover.graph.nodes.values():
        view = weight_view(prover.graph, node) if node.op == "linear" and node.name in prover.graph.live else None
        if view is None or view.parameter in taken or list(uses_of(prover.graph, view.parameter)) != [node.name]:
            continue
        classes = equal_columns(prover, node)
        first = first_of_class(classes) if classes is not None else torch.arange(0)
        others = (first != torch.arange(len(first))).nonzero().reshape(-1)
        if len(others):
            yield claim_of(prover, law, node, view, others, first[others])


def equal_columns(prover: Prover, node: Node) -> Tensor | None:
    """A number for each column of the matrix: equal where the numbers they read are equal in every vector.

    A norm over the last axis treats all numbers of a vector alike.
    """
    x = prover.graph.node(node.args[0])
    while x.op in ("core.rms", "core.unit", "core.layer") and x.args[1] == 1:
        x = prover.graph.node(x.args[0])
    if torch.Size(x.shape).numel() > LARGE or not prover.graph.depends[x.name][1]:
        return None
    labels = prover.identity.of(x.name)
    repeated = compact(labels)
    if repeated.shape[-1] != x.shape[-1]:
        return None  # every column reads the same number: a broadcast, which says nothing of vectors
    return torch.unique(repeated.reshape(-1, x.shape[-1]), dim=1, return_inverse=True)[1]


def first_of_class(classes: Tensor) -> Tensor:
    """For each column the first one that reads what it reads."""
    seen: dict[int, int] = {}
    return torch.tensor([seen.setdefault(number, place) for place, number in enumerate(classes.tolist())])


def claim_of(
    prover: Prover, law: Title, node: Node, view: WeightView, others: Tensor, first: Tensor
) -> RepeatedColumnsClaim:
    rows = prover.graph.nodes[view.parameter].shape[view.output]
    graph, moved = prover.graph, [prover.graph.node(node.args[1])]
    while moved[-1].op != "parameter":
        moved.append(graph.node(moved[-1].args[0]))
    rule = "C moves from some columns to others"
    steps = (
        *(Step(m.name, m.op, rule, "moved", True) for m in reversed(moved)),
        Step(node.name, node.op, "both columns read the same number", "C·v − C·v = 0"),
    )
    return RepeatedColumnsClaim(
        law=law,
        node=view.parameter,
        dof=rows * len(others),
        verdict="folds",
        index=others,
        axis=view.input,
        steps=steps,
        note="these columns read copies of what other columns of the matrix read",
        first=first,
    )
