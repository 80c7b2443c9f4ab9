"""Rows of a table that no drawn input reads are left out of the count; rows that no input can reach are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.jacobian import JacobianRows
from deadweight.audit.unread import is_looked_up, unread_rows
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

ROWS, WIDTH = 7, 3


class Words(nn.Module):
    """Look-ups in a table, by what `index` makes of the ids; `tied` reads the table as a weight too."""

    def __init__(
        self, index: Callable[[Tensor], Tensor] = lambda ids: ids, *, tied: bool = False, weight: float = 1.0
    ) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.index, self.weight = index, weight
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.sin(self.weight * self.table(self.index(ids)) + x)))


def example(highest: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, highest + 1, (2, 40), generator=generator)
    return ids, torch.randn(2, 40, WIDTH, generator=generator, dtype=torch.float64)


def rows_without_gradient(module: nn.Module, highest: int) -> list[int]:
    """The rows that are left out where ids up to `highest` are drawn."""
    graph = canonical(trace(module.double(), example(highest)))
    values = {node: t.detach() for node, t in graph.tensors.items()}

    def draw(seed: int) -> dict[str, Tensor]:
        return bind(graph, example(highest, seed), {})

    rows = JacobianRows(graph, values, draw, sorted(graph.parameters), 50)
    unread = unread_rows(rows, rows.take(60), search(graph).claims)
    name = graph.node_of["table.weight"]
    place = sum(rows.sizes[: rows.order.index(name)])
    own = unread[place : place + values[name].numel()].reshape(ROWS, WIDTH)
    assert torch.equal(own, own[:, :1].expand_as(own)) and int(unread.sum()) == int(own.sum())
    return own[:, 0].nonzero().reshape(-1).tolist()


def test_rows_that_no_draw_reads_are_left_out() -> None:
    assert rows_without_gradient(Words(), ROWS - 3) == [ROWS - 2, ROWS - 1]


def test_where_all_rows_are_read_none_is_left_out() -> None:
    assert rows_without_gradient(Words(), ROWS - 1) == []


def test_a_row_that_is_proved_out_of_reach_stays_in_the_count() -> None:
    either = Words(lambda ids: (ids > 1).to(torch.int64) + 2)  # an index is 2 at least
    assert rows_without_gradient(either, ROWS - 1) == list(range(4, ROWS))


def test_a_table_without_any_effect_stays_in_the_count() -> None:
    assert rows_without_gradient(Words(weight=0.0), ROWS - 3) == []


def test_a_table_that_a_readout_reads_stays_in_the_count() -> None:
    assert rows_without_gradient(Words(tied=True), ROWS - 3) == []


@pytest.mark.parametrize(("tied", "looked_up"), [(False, True), (True, False)])
def test_only_a_table_that_nothing_else_reads_is_looked_up(tied: bool, looked_up: bool) -> None:
    graph = canonical(trace(Words(tied=tied).double(), example(0)))
    assert is_looked_up(graph, graph.node_of["table.weight"]) is looked_up


def test_an_account_with_a_row_out_of_the_drawn_range_closes() -> None:
    computed = Words(lambda ids: ids + 0).double()  # a table that ids pick directly has all of its rows drawn
    counted = deadweight.audit(computed, example(ROWS - 2), complete=True).completeness
    assert counted is not None and counted.measured == counted.explained == 0
    assert counted.parameters == 2 * ROWS * WIDTH - WIDTH  # the last row has no id
