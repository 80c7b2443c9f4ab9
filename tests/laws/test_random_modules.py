"""What the search claims of random modules is true, and no dimension is counted twice.

Each claim is moved along in the original module, in float64, without checker or evidence, and their dimensions are held
against the nullity of its Jacobian. DEADWEIGHT_MODULES=1000 tries a thousand of them.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.point import Point, Values
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

from .random_modules import Program, inputs

COUNT = int(os.environ.get("DEADWEIGHT_MODULES", "12"))
STAYS = 1e-7  # of outputs of order one: powers of them reach 1e3, and rounding 1e-12 of that
LIVE = 1e-10  # of the largest singular value
EXACT = 1e-10  # a smaller ε of a norm counts as 0
LARGEST = 1e3


def outputs(module: Program, values: Values, given: tuple[Tensor, ...]) -> Tensor:
    """Everything that the module itself returns at these parameters, as one vector."""
    return torch.cat([out.reshape(-1) for out in torch.func.functional_call(module, values, given)])


def stored(module: Program, graph: Graph, moved: Values) -> Values:
    """The module's parameters, after parameters of the graph (or pieces of them) have moved."""
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    for node, value in moved.items():
        piece, whole = graph.pieces.get(node), values[graph.parameters[node]]
        part = whole if piece is None else piece.of(whole)
        part.copy_(value)
    return values


def nullity(module: Program, seed: int) -> int:
    names = {name: p.detach() for name, p in module.named_parameters()}
    count = sum(p.numel() for p in names.values())
    rows: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed + 1)
    while sum(map(len, rows)) < 1.3 * count + 10:
        given = inputs(generator)
        jacobian = torch.func.jacrev(lambda values, given=given: outputs(module, values, given))(names)
        rows.append(torch.cat([part.reshape(len(part), -1) for part in jacobian.values()], 1).detach())
    singular = torch.linalg.svdvals(torch.cat(rows))
    return count - int((singular > LIVE * singular[0]).sum())


def exact(claims: list[Claim]) -> list[Claim]:
    return [c for c in claims if c.tier != "epsilon" or c.epsilon <= EXACT]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_claimed_of_a_random_module_is_true_and_counted_once(seed: int) -> None:
    torch.manual_seed(seed)
    module, given = Program(seed, 2 + seed % 7), inputs(torch.Generator().manual_seed(seed))
    before = outputs(module, dict(module.named_parameters()), given).detach()
    if not len(module.own) or not float(before.abs().max()) < LARGEST:
        return  # nothing to claim, or numbers too large to compare
    graph = canonical(trace(module, given))
    claims = exact(search(graph).claims)
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, dict(zip(graph.inputs, given, strict=True)))
    for claim in claims:
        moved = stored(module, graph, claim.member(point, torch.Generator().manual_seed(1)))
        after = outputs(module, moved, given)
        assert float((after - before).abs().max()) < STAYS * (1 + float(before.abs().max())), (claim, module.steps)
    assert sum(claim.dof for claim in claims) <= nullity(module, seed), module.steps
