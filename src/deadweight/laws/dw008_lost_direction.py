"""DW008 the direction LayerNorm lost: x̂ sums to zero, so a weight's component along 1/γ adds only a constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from deadweight.claims.claim import Claim, Title
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.node import Graph, Node
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.labels import compact
from deadweight.proof.readers import CentredReader, centred_input, centred_reader
from deadweight.proof.shift import Outcome
from deadweight.proof.steps import Step
from deadweight.proof.weights import uses_of, weight_view
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors, as_index, chosen_place
from deadweight.rewrite.shift_effect import effect
from deadweight.rewrite.shifts import ShiftRewrite, folds_into_weights, parameters_read
from deadweight.save.facts import Fact, ZeroPlaces
from deadweight.search.prover import Prover, split_by_readers
from deadweight.search.shifts import make_claim, mean_claimed

TITLE = Title("DW008", "lost-direction")


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.graph.nodes.values():
        reader = centred_input(prover.graph, node)
        nodes = [] if reader is None else alike(prover.graph, reader)
        if reader is None or node.name not in nodes[:1]:
            continue
        parameter = prover.graph.nodes[reader.weight]
        rows = torch.arange(1, experts_in(prover.graph, node) * node.shape[-1] + 1)
        if reader.shift is None:
            why = "it reads γ·x̂, and x̂ sums to zero", "the component along 1/γ adds 0"
            steps = [Step(name, node.op, *why) for name in nodes]
            claim = make_claim(prover, TITLE, parameter, rows, Outcome(steps, {}))
            yield counted(prover, replace(claim, lost=node.name))
        elif node.op == "linear":
            yield from constant(prover, nodes, parameter, rows)


def experts_in(graph: Graph, node: Node) -> int:
    """How many experts have a matrix in the weight of a linear map; 1 for one matrix."""
    view = weight_view(graph, node)
    return 1 if view is None or view.expert is None else graph.nodes[view.parameter].shape[view.expert]


def alike(graph: Graph, reader: CentredReader) -> list[str]:
    """The linear maps that use a weight, if each reads γ·x̂ + β with the same γ and β; else none."""
    uses = list(uses_of(graph, reader.weight))
    readers = [centred_input(graph, graph.nodes[use]) for use in uses]
    same = all(f is not None and (f.gain, f.shift) == (reader.gain, reader.shift) for f in readers)
    views = {weight_view(graph, graph.nodes[use]) for use in uses}
    return sorted(uses, key=graph.place.__getitem__) if same and len(views) == 1 else []


def constant(prover: Prover, nodes: list[str], parameter: Node, rows: torch.Tensor) -> Iterator[ShiftClaim]:
    """With a shift β the component adds the constant Σ(β/γ) to each output, which must go somewhere."""
    node = prover.graph.nodes[nodes[0]]
    for groups in output_parts(prover, nodes, rows):
        outcome = follow(prover, nodes, groups)
        if outcome.proved:
            claim = make_claim(prover, TITLE, parameter, groups, outcome)
            why = "it reads γ·x̂ + β, and x̂ sums to zero: W += u(1/γ)ᵀ adds the constant u·Σ(β/γ)"
            first = replace(claim.steps[0], rule=why)
            yield counted(prover, replace(claim, steps=(first, *claim.steps[1:]), lost=node.name))


def counted(prover: Prover, claim: ShiftClaim) -> ShiftClaim:
    """Without the motion of all rows alike, of each expert, where the mean over the outputs is dead already."""
    assert claim.lost is not None
    taken = claim.index is None and mean_claimed(prover, prover.graph.nodes[claim.node])
    return replace(claim, dof=claim.dof - experts_in(prover.graph, prover.graph.nodes[claim.lost]) * int(taken))


def follow(prover: Prover, nodes: list[str], groups: torch.Tensor) -> Outcome:
    if len(nodes) > 1:
        return prover.walk_together(nodes, groups, "biases")
    return prover.walk(nodes[0], groups.expand(prover.graph.nodes[nodes[0]].shape), "biases")


def output_parts(prover: Prover, nodes: list[str], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """All outputs together where a bias follows; else part by part, for a fused weight without one."""
    if follow(prover, nodes, rows).proved:
        yield rows
        return
    node = prover.graph.nodes[nodes[0]]
    classes = split_by_readers(prover.graph, node, rows.expand(node.shape))
    if len(classes) > 1:
        yield from (compact(group).reshape(-1) for group in classes)


@dataclass(frozen=True, kw_only=True)
class LoseDirection(ShiftRewrite):
    """W += u(1/γ)ᵀ with the u that empties one column; the constant that this adds goes to the bias."""

    @property
    def nodes(self) -> tuple[str, ...]:
        reader = self.reader
        affine = [n for n in (reader.gain, reader.shift) if n is not None]
        read = [p for n in affine for p in parameters_read(self.graph, n, set())]
        read += [n for n in affine if n in self.graph.parameters]
        return tuple(dict.fromkeys((*super().nodes, *read)))

    @property
    def reader(self) -> CentredReader:
        assert self.claim.lost is not None
        reader = centred_reader(self.graph, self.graph.nodes[self.claim.lost])
        assert reader is not None
        return reader

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        values, reader, lost = self.lookup(tensors), self.reader, self.claim.lost
        assert lost is not None
        view = weight_view(self.graph, self.graph.nodes[lost])
        assert view is not None
        weight = tensors[self.target]
        rows = weight if view.output == 0 else weight.T
        gain = torch.ones(rows.shape[1], dtype=torch.float64)
        gain = values.of(reader.gain).reshape(-1) if reader.gain else gain
        if float(gain.abs().min()) < 1e-3 * float(gain.abs().max()):
            raise NotDone("the gain of the norm is too close to zero in some channel")
        moving = (self.claim.groups != 0).reshape(-1)
        taken = known.lost_columns(self.target)
        column = taken[0] if taken else chosen_place(rows, 1)
        u = torch.where(moving, -rows[:, column] * gain[column], 0.0)
        if reader.shift is not None:
            constant = u * (values.of(reader.shift).reshape(-1) / gain).sum()
            if bool((constant != 0).any()):
                shape = self.graph.nodes[lost].shape
                parameter = lambda node: self.value(tensors, node)  # noqa: E731
                amounts = effect(self.graph, self.claim, lost, constant.expand(shape), parameter)
                self.absorb(tensors, amounts, known)
        rows = rows + torch.outer(u, 1 / gain)
        rows[moving, column] = 0.0
        tensors[self.target] = rows if view.output == 0 else rows.T.contiguous()
        others = None if bool(moving.all()) else as_index(moving.nonzero().reshape(-1))
        return [ZeroPlaces(self.target, view.input, (column,), others, because="lost")]


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, ShiftClaim)
    if folds_into_weights(claim):
        raise NotDone("no bias to fold the constant into")
    assert claim.lost is not None
    if graph.nodes[claim.lost].op != "linear":
        raise NotDone("its matrices are stored as one parameter for all experts, which keeps all its columns")
    if len(graph.users[claim.node]) > 1:
        raise NotDone("its weight is used at several places, and would have to lose the direction at all of them")
    return LoseDirection(graph=graph, claim=claim)


LAW = Law(
    title=TITLE,
    fix="use RMSNorm, which loses no direction; or leave it: one number per row",
    searches=(Search(150, find),),
    rewriting=Rewriting(
        order=30, make=make_rewrite, slim_only="in the stock layout the emptied column would still be stored"
    ),
)
