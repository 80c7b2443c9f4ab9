"""A norm that makes vectors of length one, as torch.nn.functional.normalize does: scales and rotations pass it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace

WIDTH = 4
X = torch.randn(2, 3, WIDTH, dtype=torch.float64)


class Normed(nn.Module):
    """A stream that is read through a norm of its own, with a gain behind it."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.gain, self.readout, self.norm = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 5), norm
        self.last = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        stream = self.enter(x)
        stream = stream + self.down(torch.tanh(self.up(self.norm(stream) * self.gain)))
        return self.readout(self.norm(stream) * self.last)


def scaled(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * WIDTH**0.5


def codes(norm: Callable[[Tensor], Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for f in deadweight.audit(Normed(norm).double(), X).findings:
        found[f.code] = found.get(f.code, 0) + f.dof
    return found


def test_the_account_of_a_stream_behind_unit_norms_closes() -> None:
    result = deadweight.audit(Normed(scaled).double(), X, complete=True)
    assert result.completeness is not None and result.completeness.unsound == 0
    assert result.completeness.measured == result.completeness.explained == 2 * WIDTH + WIDTH * (WIDTH - 1) // 2 + 1


def test_the_graph_with_a_recognised_norm_is_the_same_function() -> None:
    module = Normed(lambda x: 2 * F.normalize(x, dim=-1) / 3).double()
    graph = canonical(trace(module, (X,)))
    assert [n.op for n in graph.nodes.values()].count("core.unit") == 2
    (found,) = evaluate(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: X})
    torch.testing.assert_close(found, module(X).detach())


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "over positions": lambda x: F.normalize(x, dim=1),
    "by the sum of sizes": lambda x: F.normalize(x, p=1.0, dim=-1),
    "of another vector": lambda x: x / (x + 1).norm(dim=-1, keepdim=True).clamp_min(1e-12).expand_as(x),
}


@pytest.mark.parametrize("norm", OTHERS.values(), ids=list(OTHERS))
def test_other_norms_let_no_rotation_pass(norm: Callable[[Tensor], Tensor]) -> None:
    assert codes(scaled)["DW012"] == WIDTH * (WIDTH - 1) // 2
    assert "DW012" not in codes(norm)


class Padded(nn.Module):
    """Keys without a bias at padded positions are zero before they are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.readout = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(F.normalize(self.k(F.pad(x, (0, 0, 0, 1))), dim=-1))


def test_evidence_is_taken_where_a_vector_of_zeros_is_normalised() -> None:
    result = deadweight.audit(Padded().double(), X)
    assert not result.notes and result.untested is None
    assert {f.code for f in result.findings if f.evidence is not None} == {"DW012"}
