"""The search for factors per channel that readers can take into their columns: gains of norms, and others."""

from __future__ import annotations

from collections.abc import Iterator

from deadweight.claims.claim import Title
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.node import Graph, Node
from deadweight.proof.basis import Turned
from deadweight.proof.readers import peel, skip_shape
from deadweight.proof.steps import Blocked
from deadweight.proof.weights import numbered
from deadweight.search.channel_scales import factor_of, long_axis
from deadweight.search.prover import Prover
from deadweight.search.spaces import Writers, explore, gain_site
from deadweight.search.turns import turn_claim


def find_read_gains(prover: Prover, law: Title, *, of_norms: bool) -> Iterator[TurnClaim]:
    """Every parameter that multiplies the channels of a value, of a norm's result or of any other, and is undone later.

    A factor may trade scale with what it multiplies as well, which is another choice.
    """
    for node in prover.graph.nodes.values():
        found = gain_of(prover.graph, node) if node.op == "aten.mul" and node.name in prover.graph.live else None
        if found is None:
            continue
        inner, gain, channel = found
        norm = prover.graph.nodes[skip_shape(prover.graph, inner)].op.startswith("core.")
        if norm is of_norms:
            yield from gain_into_readers(prover, law, node, gain, channel)


def gain_of(graph: Graph, node: Node) -> tuple[str, str, int] | None:
    """x, γ and the axis of the channels, if the node is x·γ with γ made of parameters alone."""
    inner, gain = peel(graph, node.name, "aten.mul")
    if gain is not None:
        return inner, gain, len(node.shape) - 1
    value, factor = factor_of(graph, node)
    channel = None if factor is None else long_axis(graph.nodes[factor].shape, node.shape)
    return None if value is None or factor is None or channel is None else (value, factor, channel)


def gain_into_readers(prover: Prover, law: Title, node: Node, gain: str, channel: int) -> Iterator[TurnClaim]:
    """The readers of γ·x can take γ into their columns, if the scale of each channel reaches nothing else."""
    size = node.shape[channel]
    if 0 in node.shape:
        return
    coordinate = numbered(size)
    writers = Writers()
    try:
        site = gain_site(prover.graph, gain, coordinate)
    except Blocked:
        return
    placed = [size if a == channel else 1 for a in range(channel, len(node.shape))]
    writers.add(node.name, coordinate.reshape(placed), site)
    turned = explore(prover, writers, size)
    if turned.proved and len(writers.nodes) == 1 and not turned.rotations and not known(prover, site.parameter, turned):
        yield turn_claim(prover, law, site.parameter, turned)


def known(prover: Prover, gain: str, turned: Turned) -> bool:
    """Whether two earlier claims come to the same: the factor trades scale with something that its readers undo too."""
    involved = any(claim.dof and gain in (claim.node, *claim.into) for claim in prover.claims)
    readers = [site for site in turned.sites if site.role == "in"]
    turns = [claim for claim in prover.claims if isinstance(claim, TurnClaim)]
    return involved and any(
        site.role == "in" and (site.parameter, site.axis) == (reader.parameter, reader.axis)
        for claim in turns
        for site in claim.sites
        for reader in readers
    )
