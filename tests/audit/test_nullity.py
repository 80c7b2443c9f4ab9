"""The account finds every redundant direction, and says when rounding would decide."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.account import GAP
from deadweight.audit.jacobian import JacobianRows
from deadweight.audit.nullity import free_columns, null_directions, unexplained_directions, unit_rows
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.source.randomise import randomise


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_singular_values(values: list[float], rows: int) -> Tensor:
    left, right = (torch.linalg.qr(noise(n, len(values), seed=n))[0] for n in (rows, len(values)))
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T


@pytest.mark.parametrize("rank", [0, 1, 17, 39, 40])
@pytest.mark.parametrize("rows", [30, 40, 55])
def test_the_null_space_of_a_matrix_of_known_rank_is_found_whole(rank: int, rows: int) -> None:
    matrix = noise(rows, rank, seed=1) @ noise(rank, 40, seed=2)
    result, gap = null_directions(matrix)
    assert result.shape == (40, 40 - min(rank, rows)) and gap > 1e5
    torch.testing.assert_close(result.T @ result, torch.eye(result.shape[1], dtype=torch.float64))
    assert not result.numel() or float((matrix @ result).abs().max()) < 1e-12 * float(matrix.abs().max() + 1e-300)


def test_faint_live_directions_count_as_live() -> None:
    result, gap = null_directions(with_singular_values([1.0] * 20 + [1e-3, 1e-6, 1e-9] + [0.0] * 3, 40))
    assert result.shape[1] == 3 and gap > GAP


def test_singular_values_without_a_gap_are_undecided() -> None:
    _, gap = null_directions(with_singular_values([1.0] * 20 + [10.0**-k for k in range(1, 15)], 40))
    assert gap < GAP


def test_as_many_parameters_are_held_fixed_as_directions_are_explained() -> None:
    basis = torch.linalg.qr(noise(30, 8))[0]
    kept = free_columns(basis)
    held = [i for i in range(30) if i not in kept.tolist()]
    assert len(held) == 8 and float(torch.linalg.svdvals(basis[held]).min()) > 1e-3
    assert free_columns(torch.zeros(30, 0, dtype=torch.float64)).tolist() == list(range(30))


class Chain(nn.Module):
    """B·A·x with a bottleneck of 2: 4 dimensions are free."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x)))


def rows_of(module: nn.Module, *inputs: Tensor) -> JacobianRows:
    graph = canonical(trace(module, inputs))
    wide = randomise(module, 0)
    values = {node: wide.get_parameter(name).detach() for node, name in graph.parameters.items()}

    def draw(seed: int) -> dict[str, Tensor]:
        return bind(graph, tuple(noise(*x.shape, seed=seed) for x in inputs), {})

    return JacobianRows(graph, values, draw, sorted(graph.parameters), 300)


def test_what_is_explained_is_not_found_again_and_the_rest_is() -> None:
    nothing = unexplained_directions(rows_of(Chain(), noise(3, 5)), torch.zeros(18, 0, dtype=torch.float64))
    assert nothing.directions.shape == (18, 4) and nothing.gap > GAP
    known = torch.linalg.qr(nothing.directions)[0][:, :3]
    rest = unexplained_directions(rows_of(Chain(), noise(3, 5)), known)
    assert rest.directions.shape == (18, 1) and math.isfinite(rest.gap)
    both = torch.linalg.svdvals(torch.cat([known, rest.directions], 1))
    assert float(both.min()) > 1e-6
    probes = unit_rows(rows_of(Chain(), noise(3, 5)).take(20))
    assert float((probes @ rest.directions).abs().max()) < 1e-12


class RareRows:
    """Rows of which the first have almost no effect along one direction, and none along another; fresh ones have.

    A third direction has no effect on any row.
    """

    def __init__(self, size: int, *, faint: float) -> None:
        self.axes, self.faint, self.drawn = torch.linalg.qr(noise(size, size, seed=7))[0], faint, 0

    def take(self, count: int) -> Tensor:
        effects = noise(count, len(self.axes), seed=self.drawn)
        effects[:, 0] = 0.0
        if not self.drawn:
            effects[:, 1], effects[:, 2] = 0.0, self.faint * effects[:, 2]
        self.drawn += 1
        return effects @ self.axes.T


@pytest.mark.parametrize("faint", [1.0, 1e-9])
def test_a_direction_stays_redundant_where_rounding_mixed_it_with_one_that_is_rarely_seen(faint: float) -> None:
    """Rounding leaves 1e-16/1e-9 of the faint direction in the redundant one, and fresh rows show that share."""
    result = unexplained_directions(RareRows(30, faint=faint), torch.zeros(30, 0, dtype=torch.float64))  # type: ignore[arg-type]
    assert result.directions.shape == (30, 1) and result.gap > GAP
    assert float(RareRows(30, faint=faint).axes[:, 0] @ result.directions[:, 0]) ** 2 > 1 - 1e-12


def test_a_relu_network_is_seen_on_enough_inputs_to_close_its_account() -> None:
    """Of two hidden layers, some pairs of units are on together for few inputs only."""
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    counted = deadweight.audit(network, noise(40, 6).float(), complete=True).completeness
    assert counted is not None and counted.measured == counted.explained == 24


class Chooser(nn.Module):
    """Two of four experts by score; the bias is added for the choice alone, or to the weights too."""

    def __init__(self, *, weighs: bool) -> None:
        super().__init__()
        self.score, self.weighs = nn.Linear(6, 4, bias=False), weighs
        self.bias, self.spare = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.experts = nn.Parameter(torch.randn(4, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.score(x) + (0.1 * self.bias if self.weighs else 0.0))
        chosen = (scores + 0.1 * self.bias).topk(2, -1).indices
        weights = scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        return torch.tanh(torch.einsum("be,bi,eio->bo", weights, x, self.experts))


@pytest.mark.parametrize("weighs", [False, True])
def test_a_parameter_that_only_chooses_is_neither_live_nor_redundant(weighs: bool) -> None:
    result = deadweight.audit(Chooser(weighs=weighs), noise(20, 6).float(), complete=True)
    counted = result.completeness
    assert counted is not None and counted.measured == counted.explained == 4  # `spare` is not read at all
    assert counted.parameters == 24 + 4 + 72 + (4 if weighs else 0)
    assert not any(u.parameter == "bias" and "no gradient" in u.why for u in result.unknown)


class WholeNumbers(torch.nn.Module):
    """Parameters that no derivative reaches: integers, and a table without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.ones(3, dtype=torch.long), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.steps + self.nothing.sum()


def test_a_model_without_real_parameters_has_nothing_to_count() -> None:
    result = deadweight.audit(WholeNumbers(), (torch.randn(2, 3),), complete=True)
    assert result.completeness is not None
    assert (result.completeness.measured, result.completeness.explained) == (0, 0)
