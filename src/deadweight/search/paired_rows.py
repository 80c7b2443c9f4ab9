"""DW013 for single rows: a row of one table that is always read together with one row of another.

Models that give padding tokens a position of their own look the padding row k of the word table up exactly where they
look row r of the position table up. Both are added, so any vector v can move from one row to the other.

That token = k and position = r always come together is proved by exhaustion: positions must depend on the tokens only
through "token = k" (a comparison with one number in the graph), and then every pattern of that comparison is tried.
Where the word table is a readout's weight too, v must be along 1/γ of the norm that the readout reads, for then the
logit k moves by a constant, which its bias takes over (as for all rows, see tied_table).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from deadweight.claims.claim import Claim, Title, normal
from deadweight.claims.point import Motion, Point, Values, ancestors
from deadweight.claims.shift_claim import FAR, ShiftClaim
from deadweight.graph.evaluate import value_of
from deadweight.graph.node import Graph, Node, Ref
from deadweight.proof.steps import Step
from deadweight.proof.weights import uses_of
from deadweight.search.prover import Prover
from deadweight.search.shifts import mean_claimed
from deadweight.search.tied_table import moves_readout_alone

MOST_PATTERNS = 10  # places whose comparisons are all tried: 2^10 patterns


@dataclass(frozen=True, kw_only=True)
class PairedRowsClaim(Claim):
    """Row `row` of `node` moves by v and row `other_row` of `other` by −v; a tied readout by what `readout` says."""

    row: int
    other: str
    other_row: int
    readout: ShiftClaim | None = None

    def motions(self, point: Point) -> Iterator[Motion]:
        if self.readout is not None:
            yield from (self.completed(point, motion) for motion in self.readout.motions(point))
            return
        for v in torch.eye(point.values[self.node].shape[1], dtype=torch.float64):
            yield self.along(point, v)

    def direction(self, point: Point, generator: torch.Generator) -> Motion:
        if self.readout is not None:
            return self.completed(point, self.readout.direction(point, generator))
        return self.along(point, normal(generator, point.values[self.node].shape[1]))

    def member(self, point: Point, generator: torch.Generator) -> Values:
        """The motion is linear: a long way along it is as good as a short one."""
        return {n: point.values[n] + FAR * t for n, t in self.direction(point, generator).items()}

    def along(self, point: Point, v: torch.Tensor) -> Motion:
        table = torch.zeros_like(point.values[self.node], dtype=torch.float64)
        table[self.row] = v
        return self.completed(point, {self.node: table})

    def completed(self, point: Point, motion: Motion) -> Motion:
        """What the first row gains the other loses."""
        other = torch.zeros_like(point.values[self.other], dtype=torch.float64)
        other[self.other_row] = -motion[self.node][self.row]
        return {**motion, self.other: other}


@dataclass(frozen=True)
class Pair:
    """Two lookups in one sum, the rows that always meet there, and the nodes between."""

    first: Node
    second: Node
    rows: tuple[int, int]
    steps: tuple[Step, ...]


def find_paired_rows(prover: Prover, law: Title) -> Iterator[PairedRowsClaim]:
    for pair in pairs(prover.graph):
        table, other = (node.args[0].name for node in (pair.first, pair.second))
        readouts = [use for use in uses_of(prover.graph, table) if use != pair.first.name]
        if not readouts:
            overlap = all(mean_claimed(prover, prover.graph.nodes[name]) for name in (table, other))
            yield claim_of(prover, law, pair, prover.graph.nodes[table].shape[1] - int(overlap), None)
        elif len(readouts) == 1:
            rows = (torch.arange(prover.graph.nodes[table].shape[0]) == pair.rows[0]).to(torch.int64)
            readout = moves_readout_alone(prover, law, prover.graph.nodes[table], prover.graph.nodes[readouts[0]], rows)
            if readout is not None:
                yield claim_of(prover, law, pair, 1, readout)


def claim_of(prover: Prover, law: Title, pair: Pair, dof: int, readout: ShiftClaim | None) -> PairedRowsClaim:
    table, other = (node.args[0].name for node in (pair.first, pair.second))
    taken = () if readout is None else readout.into
    return PairedRowsClaim(
        law=law,
        node=table,
        dof=dof,
        verdict="folds",
        into=(other, *taken),
        index=torch.tensor([pair.rows[0]]),
        steps=(*pair.steps, *(readout.steps if readout is not None else ())),
        note=f"row {pair.rows[0]} is read exactly where row {pair.rows[1]} of {prover.graph.parameters[other]} is",
        row=pair.rows[0],
        other=other,
        other_row=pair.rows[1],
        readout=readout,
    )


def pairs(graph: Graph) -> Iterator[Pair]:
    """Lookups of two tables in one sum of which some rows always meet."""
    lookups = [n for n in graph.nodes.values() if n.op == "aten.embedding" and is_table(graph, n)]
    for first, second in product(lookups, lookups):
        if first is not second and len(list(uses_of(graph, second.args[0].name))) == 1:
            steps = common_sum(graph, first, second)
            n_rows = graph.node(first.args[0]).shape[0]
            rows = None if steps is None else meeting_rows(graph, first.args[1].name, second.args[1].name, n_rows)
            if steps is not None and rows is not None:
                yield Pair(first, second, rows, steps)


def is_table(graph: Graph, node: Node) -> bool:
    return isinstance(node.args[1], Ref) and graph.node(node.args[0]).op == "parameter"


def common_sum(graph: Graph, first: Node, second: Node) -> tuple[Step, ...] | None:
    """The steps from two lookups to the sum in which both meet, if nothing else reads them or the sums before it."""
    ways = [sums_after(graph, node) for node in (first, second)]
    meeting = next((name for name in ways[0] if name in ways[1]), None)
    if meeting is None:
        return None
    moved = dict.fromkeys([n for way in ways for n in way[: way.index(meeting)]])
    places = sorted(moved, key=graph.place.__getitem__)
    steps = [
        Step(n, graph.nodes[n].op, "a row is moved by v, or by −v", "moved where it is read", True) for n in places
    ]
    return (*steps, Step(meeting, graph.nodes[meeting].op, "both rows are read at the same places", "v − v = 0"))


def sums_after(graph: Graph, node: Node) -> list[str]:
    """The lookup and the sums of its shape that it goes through, each of which has one reader."""
    result = [node.name]
    while len(graph.users[result[-1]]) == 1 and result[-1] not in graph.outputs:
        reader = graph.users[result[-1]][0]
        twice = reader.op == "aten.add" and len(reader.inputs) == 2
        if not twice or reader.kwargs or reader.shape != node.shape:
            break
        result.append(reader.name)
    return result


def meeting_rows(graph: Graph, tokens: str, positions: str, n_rows: int) -> tuple[int, int] | None:
    """k and r such that positions are r exactly where tokens are k, by trying every pattern of "token = k"."""
    for comparison in graph.users[tokens]:
        number = comparison.args[1] if len(comparison.args) == 2 else None
        if comparison.op not in ("aten.eq", "aten.ne") or type(number) is not int:
            continue
        needed = ancestors(graph, positions, {comparison.name: True})
        alone = not any(graph.nodes[n].op in ("input", "parameter") for n in needed)
        if not alone or torch.Size(comparison.shape).numel() > MOST_PATTERNS or positions == comparison.name:
            continue
        row = always_there(graph, comparison, needed)
        if row is not None and 0 <= number < n_rows:  # no lookup ever reads row k otherwise
            return number, row
    return None


def always_there(graph: Graph, comparison: Node, needed: list[str]) -> int | None:
    """The one position of the tokens that are k, if no other token ever has it."""
    here, elsewhere = set[int](), set[int]()
    for bits in product((False, True), repeat=torch.Size(comparison.shape).numel()):
        pattern = torch.tensor(bits).reshape(comparison.shape)
        known = {comparison.name: pattern}
        for name in needed:
            known[name] = value_of(graph, graph.nodes[name], known, graph.tensors, {})
        chosen = pattern if comparison.op == "aten.eq" else ~pattern
        positions = known[needed[-1]]
        if positions.is_meta:  # a model without values, whose code names the device: nothing is known of its numbers
            return None
        here.update(positions[chosen].tolist())
        elsewhere.update(positions[~chosen].tolist())
    return here.pop() if len(here) == 1 and not here & elsewhere else None
