"""A layer that is used several times in a row: its laws must hold at all uses at once, with one motion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.source.randomise import randomise

D, HEADS, HIDDEN = 8, 2, 12
INPUT = torch.randn(2, 4, 9)


class Layer(nn.Module):
    """Attention and a feed-forward half, each with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.attended, self.done = nn.LayerNorm(D, eps=0.0), nn.LayerNorm(D, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = self.attended(x + self.o(heads.transpose(1, 2).flatten(2)))
        return self.done(x + self.down(nn.functional.gelu(self.up(x))))


class Shared(nn.Module):
    """One layer, several times; `read` names a bias that something else reads too."""

    def __init__(self, uses: int = 2, read: str = "") -> None:
        super().__init__()
        self.layer, self.first, self.last = Layer(), nn.Linear(9, D), nn.Linear(D, 6)
        self.uses, self.read = uses, read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.uses):
            x = self.layer(x)
        return self.last(x if not self.read else x * self.layer.get_parameter(self.read))


def moved_differences(module: nn.Module) -> dict[str, float]:
    """By law, how far the module itself gives other outputs after a long way along each of its claims."""
    clone = randomise(module, 0)
    graph = canonical(trace(clone, (INPUT.double(),), {}))
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: INPUT.double()})
    found: dict[str, float] = {}
    for claim in search(graph).claims:
        after = randomise(module, 0)
        with torch.no_grad():
            for node, value in claim.member(point, torch.Generator().manual_seed(3)).items():
                after.get_parameter(graph.parameters[node]).copy_(value)
        other = torch.randn(3, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        found[claim.code] = max(found.get(claim.code, 0.0), float((clone(other) - after(other)).abs().max()))
    return found


def by_law(module: nn.Module) -> dict[str, int]:
    torch.manual_seed(0)
    found: dict[str, int] = {}
    for finding in deadweight.audit(module, INPUT).findings:
        found[finding.code] = found.get(finding.code, 0) + finding.dof
    return found


@pytest.mark.parametrize("uses", [2, 3])
def test_every_law_of_a_layer_holds_at_all_its_uses(uses: int) -> None:
    found = moved_differences(Shared(uses))
    assert set(found) == {"DW002", "DW003", "DW005", "DW007", "DW008", "DW009", "DW010", "DW014"}
    assert max(found.values()) < 1e-9, found  # three layers; members of the groups are up to about 10 in size


def test_a_shared_layer_has_as_many_dimensions_as_one_that_is_used_once() -> None:
    """Key bias 8, value bias 8, means of o, down, last 22; both shifts 16, readers of LayerNorm 12 + 6, bases 32 + 32,
    one scale for each norm. One dimension is left: the mean of the first vector turned by what LayerNorm lost."""
    torch.manual_seed(0)
    result = deadweight.audit(Shared(), INPUT, complete=True)
    assert result.completeness is not None and not result.completeness.unsound
    assert by_law(Shared()) == {
        "DW002": 8, "DW003": 8, "DW005": 22, "DW007": 16, "DW008": 18, "DW009": 32, "DW010": 32, "DW014": 2,
    }  # fmt: skip
    assert (result.completeness.measured, result.completeness.explained) == (139, 138)


def test_a_value_bias_does_not_fold_into_a_shared_bias_that_is_read_elsewhere() -> None:
    assert "DW003" not in by_law(Shared(read="o.bias"))


def test_a_norm_shift_is_not_lost_to_a_shared_bias_that_is_read_elsewhere() -> None:
    """The shift of the first norm would go to down.bias; that of the second goes to others."""
    torch.manual_seed(0)
    for read, expected in (("", {"layer.attended.bias", "layer.done.bias"}), ("down.bias", {"layer.done.bias"})):
        findings = deadweight.audit(Shared(read=read), INPUT).findings
        assert {f.parameter for f in findings if f.code == "DW007"} == expected


def test_a_shared_reader_keeps_its_direction_where_one_use_reads_no_norm() -> None:
    """The queries of the first use read a projection, not a LayerNorm."""
    claims = deadweight.audit(Shared(), INPUT).findings
    assert "layer.q.weight" not in {f.parameter for f in claims if f.code == "DW008"}
    assert "layer.up.weight" in {f.parameter for f in claims if f.code == "DW008"}


class TwoPlaces(nn.Module):
    """A bias that is added behind two different value projections: they would have to move it by different amounts."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(2)])
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        for value, out in zip(self.values, self.outs, strict=True):
            x = torch.tanh(out(x.mean(-1, keepdim=True).softmax(1).transpose(1, 2) @ value(x)) + self.bias)
        return x


def test_two_value_biases_do_not_fold_into_one_shared_bias() -> None:
    torch.manual_seed(0)
    assert not [f for f in deadweight.audit(TwoPlaces(), torch.randn(2, 4, D)).findings if f.code in ("DW003", "DW017")]
