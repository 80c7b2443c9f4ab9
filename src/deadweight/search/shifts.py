"""Building blocks of the shift laws: sources to try, and what a proof went through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from deadweight.claims.claim import Title
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.experts import EXPERTS
from deadweight.graph.node import Graph, Node, Ref, is_vector
from deadweight.proof.labels import compact
from deadweight.proof.operation_groups import CONVOLUTIONS
from deadweight.proof.shift import Absorbers, Outcome
from deadweight.proof.verdict import Verdict
from deadweight.search.prover import Prover

Accept = Callable[[Prover, Node, Outcome], bool]
CENTRES = ("core.layer", "core.group", "core.instance", "core.batch")


def ended_at(outcome: Outcome) -> set[str]:
    """The operations at which some shift ceased to be."""
    return {s.op for s in outcome.steps if s.value is None}


def passed(outcome: Outcome, *ops: str) -> bool:
    return any(s.op in ops and s.value is not None for s in outcome.steps)


def make_claim(prover: Prover, law: Title, node: Node, groups: Tensor, outcome: Outcome) -> ShiftClaim:
    """A claim from a proof: dead if nothing had to take the shift over, else folded into what did."""
    absorbers = tuple(a for a, _ in outcome.absorbed.values())
    verdict: Verdict = "folds" if absorbers else "dead"
    into = tuple(dict.fromkeys(a.parameter for a in absorbers))
    short = compact(groups)
    axis, index = part(node, groups)
    return ShiftClaim(
        law=law,
        node=node.name,
        dof=int((short.unique() != 0).sum()),
        verdict=verdict,
        into=into,
        index=index,
        axis=axis,
        steps=tuple(outcome.steps),
        groups=groups,
        absorbers=absorbers,
        note="; ".join(sorted(outcome.conditions)),
    )


def part(node: Node, groups: Tensor) -> tuple[int, Tensor | None]:
    """The part of a parameter that some group touches, along its longest axis if it is a vector, else by rows."""
    if not node.shape:
        return 0, None
    whole = groups.ndim == len(node.shape)  # a weight's rows may be numbered alone
    axis = max(range(len(node.shape)), key=lambda a: node.shape[a]) if is_vector(node) and whole else 0
    touched = (compact(groups) != 0).movedim(axis, 0)
    touched = touched.reshape(len(touched), -1).any(1)
    touched = touched.expand(node.shape[axis]) if len(touched) == 1 else touched
    return axis, None if bool(touched.all()) else torch.nonzero(touched).reshape(-1)


def each_element(
    prover: Prover, law: Title, node: Node, accept: Accept, absorbers: Absorbers = "none"
) -> Iterator[ShiftClaim]:
    """Every element of a vector on its own, part by part where a fused vector falls into parts."""
    for groups in prover.parts(node):
        if claimed(prover, node, groups):
            continue
        kept, outcome = prover.prove(node.name, groups, absorbers)
        if outcome.proved and accept(prover, node, outcome):
            yield vector_claim(prover, law, node, kept, outcome)


def vector_claim(prover: Prover, law: Title, node: Node, groups: Tensor, outcome: Outcome) -> ShiftClaim:
    """A claim about a vector, less the sums of its elements that an earlier law has claimed.

    Where single elements fold and some sum of them is dead, what takes them over is dead along that sum too, and
    claimed so: the motion of the sum would be counted twice.
    """
    claim = make_claim(prover, law, node, groups, outcome)
    return replace(claim, dof=claim.dof - sum(common_sums(groups, c.groups) for c in shift_claims(prover, node)))


def common_sums(one: Tensor, other: Tensor) -> int:
    """How many sets of elements are made of whole groups of the one, and of whole groups of the other (0: no group)."""
    names = torch.arange(1, one.numel() + 1)  # of the set that an element is in, 0 for those outside
    while True:
        before = names
        for groups in (one.reshape(-1), other.reshape(-1)):
            least = torch.full((int(groups.max()) + 1,), len(names)).scatter_reduce(0, groups, names, "amin")
            names = torch.where(groups == 0, 0, least[groups])
        if torch.equal(names, before):
            return int((names.unique() != 0).sum())


def each_norm_shift(prover: Prover, law: Title, accept: Accept) -> Iterator[ShiftClaim]:
    """What any norm adds behind itself, element by element; biases and weights may take it over."""
    for node in prover.parameters():
        if is_vector(node) and norm_behind(prover.graph, added_once(prover.graph, node)) is not None:
            yield from each_element(prover, law, node, accept, "weights")


def claimed(prover: Prover, node: Node, groups: Tensor) -> bool:
    """Whether an earlier law has already made these elements redundant, one by one."""
    single = [c for c in shift_claims(prover, node) if element_wise(c)]
    return any(bool(((c.groups != 0) & (groups != 0)).any()) for c in single)


def all_claimed(prover: Prover, node: Node) -> bool:
    """Whether earlier laws have made every element of a parameter redundant, one by one."""
    single = [c for c in shift_claims(prover, node) if element_wise(c)]
    return bool(single) and bool(torch.stack([(c.groups != 0).expand(node.shape) for c in single]).any(0).all())


def mean_claimed(prover: Prover, node: Node) -> bool:
    """Whether an earlier law has found a common motion of a parameter's elements dead: one direction is taken."""
    return any(c.verdict == "dead" and not element_wise(c) for c in shift_claims(prover, node))


def shift_claims(prover: Prover, node: Node) -> list[ShiftClaim]:
    """What earlier laws claim of a parameter's elements; the direction that LayerNorm lost is no sum of elements."""
    return [c for c in prover.claims if c.node == node.name and isinstance(c, ShiftClaim) and c.lost is None]


def tied_groups(graph: Graph, node: Node) -> Iterator[Tensor]:
    """Groups of elements that write the same thing to every output channel of a parameter."""
    size = torch.Size(node.shape).numel()
    if is_vector(node):
        yield torch.ones(node.shape, dtype=torch.int64)
        return
    for reader in graph.users[node.name]:
        if reader.op == "aten.embedding" or (reader.op in ("aten.add", "aten.slice", "aten.expand", "aten.index")):
            rows = torch.arange(1, size // node.shape[-1] + 1)
            yield rows.reshape(*node.shape[:-1], 1).expand(node.shape)
        elif reader.op == "linear" or reader.op in CONVOLUTIONS:
            yield torch.arange(1, size // node.shape[0] + 1).reshape(1, *node.shape[1:]).expand(node.shape)
        elif reader.op == EXPERTS:
            output = 3 - reader.args[3]
            shape = [1 if a == output else n for a, n in enumerate(node.shape)]
            yield torch.arange(1, size // node.shape[output] + 1).reshape(shape).expand(node.shape)
        elif reader.op == "aten.t":
            yield torch.arange(1, node.shape[0] + 1).reshape(-1, 1).expand(node.shape)
        else:
            continue
        return


def grouped(groups_of: int, node: Node) -> Tensor:
    """A vector whose channels move together in blocks of equal size."""
    size = torch.Size(node.shape).numel()
    blocks = torch.arange(size) // max(1, size // groups_of) + 1
    return blocks.reshape(node.shape)


def without_unread(prover: Prover, node: Node, groups: Tensor) -> Tensor:
    """Leave out what nothing reads: it is dead element by element already."""
    for claim in prover.claims:
        if isinstance(claim, ShiftClaim) and claim.unread and claim.node == node.name:
            unread = claim.groups != 0
            rows = unread.reshape(len(unread), -1).all(1).reshape(-1, *[1] * (groups.ndim - 1))
            short = compact(groups) if torch.equal(rows.expand_as(unread), unread) else groups
            groups = torch.where(rows if short is not groups else unread, 0, short).expand(groups.shape)
    return groups


def common(
    prover: Prover, law: Title, node: Node, accept: Accept, absorbers: Absorbers = "none"
) -> Iterator[ShiftClaim]:
    """What a parameter writes alike to all its output channels."""
    if absorbers == "none" and not is_vector(node) and prover.surely_alive(node.name):
        return
    for groups in tied_groups(prover.graph, node):
        groups = without_unread(prover, node, groups)
        if any(torch.equal(compact(c.groups), compact(groups)) for c in shift_claims(prover, node)):
            continue  # it dies in several ways, and an earlier law has claimed it
        outcome = prover.attempt(node.name, groups, absorbers)
        if outcome.proved and accept(prover, node, outcome):
            yield make_claim(prover, law, node, groups, outcome)


def added_once(graph: Graph, node: Node) -> Node | None:
    """The addition that is a parameter's only use, looking through views; of a shared layer's, the first of them."""
    current, shared = node, {reader.op for reader in graph.users[node.name]} == {"aten.add"}
    while len(graph.users[current.name]) == 1 or (shared and current is node):
        reader = graph.users[current.name][0]
        if reader.op == "aten.add":
            return reader
        if reader.op not in ("aten.reshape", "aten.unsqueeze", "aten.expand", "aten.embedding"):
            return None
        current = reader
    return None


def norm_behind(graph: Graph, addition: Node | None) -> Node | None:
    """The core whose affine shift an added parameter is, if it is one."""
    if addition is None:
        return None
    for ref in addition.args:
        if isinstance(ref, Ref):
            node = graph.node(ref)
            inner = [graph.node(a) for a in node.args if isinstance(a, Ref)] if node.op == "aten.mul" else []
            for candidate in (node, *inner):
                if candidate.op.startswith("core."):
                    return candidate
    return None
