"""Tables that are read twice: tied to a readout, or row by row together with another table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.claims.claim import Claim
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.source.randomise import randomise

WORDS, WIDTH, LENGTH, PAD = 7, 4, 4, 1
TABLE = "readout"  # the name under which a tied table is traced
TOKENS = torch.tensor([[2, 5, 1, 3]])


class Masked(nn.Module):
    """Word and position tables, a norm, and a head whose readout is the word table."""

    def __init__(self, *, tied: bool = True, positions: str = "plain", bias: bool = True, eps: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH if positions == "plain" else LENGTH + PAD + 1, WIDTH)
        self.first, self.last = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH, eps=1e-5)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WORDS)) if bias else None
        self.readout = self.words.weight if tied else nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.kind = positions

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(self.places(tokens))
        x = self.last(torch.tanh(self.mixed(self.first(x))))
        return nn.functional.linear(x, self.readout, self.bias)

    def places(self, tokens: Tensor) -> Tensor:
        if self.kind == "plain":
            return torch.arange(tokens.shape[1])
        other = (tokens != PAD).to(torch.int64)
        counted = torch.cumsum(other, 1)
        return counted * other + PAD if self.kind == "padded" else counted + PAD


def proved(module: nn.Module, code: str) -> tuple[list[Claim], Point]:
    """The claims of one law on a float64 clone with random parameters, and the point to try them at."""
    clone = randomise(module, 0)
    graph = canonical(trace(clone, (TOKENS,), {}))
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: TOKENS})
    return [c for c in search(graph).claims if c.code == code], point


def names(point: Point, claim: Claim) -> set[str]:
    return {point.graph.parameters[n] for n in (claim.node, *claim.into)}


def moved_difference(module: nn.Module, claim: Claim, point: Point) -> float:
    """How far the module itself gives other outputs for any tokens, after a long way along the claim."""
    before, after = randomise(module, 0), randomise(module, 0)
    moved = claim.member(point, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for node, value in moved.items():
            after.get_parameter(point.graph.parameters[node]).copy_(value)
    tokens = torch.randint(0, WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(4))
    return float((before(tokens) - after(tokens)).abs().max())


def test_a_tied_table_moves_along_the_direction_that_the_head_does_not_see() -> None:
    claims, point = proved(Masked(), "DW013")
    tied = [c for c in claims if point.graph.parameters[c.node] == TABLE]
    assert [c.dof for c in tied] == [1] and names(point, tied[0]) == {TABLE, "positions.weight", "bias"}
    assert moved_difference(Masked(), tied[0], point) < 1e-12  # a few hundred operations on numbers of order one


def test_a_tied_table_stays_where_the_readout_has_no_bias() -> None:
    claims, point = proved(Masked(bias=False), "DW013")
    assert not [c for c in claims if point.graph.parameters[c.node] == TABLE]


def test_a_tied_table_has_a_scale_that_the_last_norm_undoes() -> None:
    claims, point = proved(Masked(), "DW014")
    scale = next(c for c in claims if TABLE in names(point, c))
    assert names(point, scale) == {TABLE, "positions.weight", "last.weight", "last.bias"}
    assert moved_difference(Masked(), scale, point) < 1e-12


def test_a_tied_table_has_no_scale_where_the_last_norm_is_read_elsewhere_too() -> None:
    class Returned(Masked):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.words(tokens) + self.positions(self.places(tokens))
            x = self.last(torch.tanh(self.mixed(self.first(x))))
            return nn.functional.linear(x, self.readout, self.bias), x

    claims, point = proved(Returned(), "DW014")
    assert not [c for c in claims if TABLE in names(point, c)]


@pytest.mark.parametrize(("tied", "dof"), [(True, 1), (False, WIDTH - 1)])  # the mean of each row is dead already
def test_the_padding_row_trades_with_the_position_that_only_padding_has(tied: bool, dof: int) -> None:
    module = Masked(tied=tied, positions="padded")
    claims, point = proved(module, "DW013")
    rows = [c for c in claims if c.index is not None and c.index.tolist() == [PAD]]
    assert [c.dof for c in rows] == [dof]
    assert moved_difference(module, rows[0], point) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
def test_a_padding_row_whose_position_other_tokens_have_too_stays(tied: bool) -> None:
    claims, _ = proved(Masked(tied=tied, positions="counted"), "DW013")
    assert not [c for c in claims if c.index is not None and c.index.tolist() == [PAD]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["plain", "padded"])
def test_nothing_is_left_unexplained_in_a_tied_masked_model(tied: bool, positions: str) -> None:
    torch.manual_seed(0)
    eps = 0.0 if positions == "plain" else 0.1  # with 0 the one vector of padding has a scale of its own
    module = Masked(tied=tied, positions=positions, eps=eps)
    found = deadweight.audit(module, TOKENS.repeat(2, 1), complete=True).completeness
    assert found is not None and not found.unsound
    assert found.measured == found.explained
