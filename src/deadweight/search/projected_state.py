"""The recurrent half of DW019: an LSTM with `proj_size` projects its state, and W_hh and all readers undo a turn of it.

The graph multiplies W_hh with W_hr, so that the projection is a matrix which is both a writer and data that is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.claims.claim import Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.basis import Site
from deadweight.proof.weights import WeightView, numbered, uses_of, weight_view
from deadweight.search.prover import Prover
from deadweight.search.spaces import Writers, explore
from deadweight.search.turns import dimension, turn_claim


def find_projected_states(prover: Prover, law: Title) -> Iterator[TurnClaim]:
    for node in prover.parameters():
        writers = projection_writers(prover.graph, node)
        if writers is not None:
            turned = explore(prover, writers, node.shape[0])
            if turned.proved and dimension(turned) and any(site.role == "in" for site in turned.sites):
                yield turn_claim(prover, law, node.name, turned)


def projection_writers(graph: Graph, node: Node) -> Writers | None:
    """Where a matrix writes: as the weight of linear maps, and as data, column by column, that another weight reads."""
    uses = [graph.nodes[name] for name in uses_of(graph, node.name)]
    columns = [columns_read(graph, use, node) for use in uses]
    if len(node.shape) != 2 or not any(columns):
        return None
    coordinate = numbered(node.shape[0])
    writers = Writers(sites=[Site(node.name, "out", 0, coordinate)])
    for use, read in zip(uses, columns, strict=True):
        if read is None and weight_view(graph, use) != WeightView(node.name, 0, 1):
            return None
        writers.nodes[read or use.name] = coordinate
    return writers


def columns_read(graph: Graph, use: Node, node: Node) -> str | None:
    """The transposed matrix, if a linear map reads it as data."""
    data = use.args[0] if use.op == "linear" else None
    if not isinstance(data, Ref) or graph.node(data).op != "aten.t" or data == use.args[1]:
        return None
    return data.name if graph.node(data).args[0] == Ref(node.name) else None
