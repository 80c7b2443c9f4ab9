"""Rows of a table that no drawn input reads are told apart from rows that no input can reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.audit.account import Account, make_account
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
        self,
        index: Callable[[Tensor], Tensor] = lambda ids: ids,
        *,
        tied: bool = False,
        weight: float = 1.0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.index, self.weight, self.norm = index, weight, norm or nn.Identity()
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.sin(self.norm(self.weight * self.table(self.index(ids))) + x)))


def example(highest: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, highest + 1, (2, 40), generator=generator)
    return ids, torch.randn(2, 40, WIDTH, generator=generator, dtype=torch.float64)


def account_of(module: nn.Module, highest: int) -> tuple[Account, JacobianRows]:
    """The account of a module where ids up to `highest` are drawn, and rows of its Jacobian."""
    graph = canonical(trace(module.double(), example(highest)))
    values = {node: t.detach() for node, t in graph.tensors.items()}

    def draw(seed: int) -> dict[str, Tensor]:
        return bind(graph, example(highest, seed), {})

    rows = JacobianRows(graph, values, draw, sorted(graph.parameters), 50)
    return make_account(graph, values, draw, search(graph).claims), rows


def rows_without_gradient(module: nn.Module, highest: int) -> list[int]:
    """The rows that are not read where ids up to `highest` are drawn."""
    _, rows = account_of(module, highest)
    unread = unread_rows(rows, rows.take(60), search(rows.graph).claims)
    name = rows.graph.node_of["table.weight"]
    place = sum(rows.sizes[: rows.order.index(name)])
    own = unread[place : place + rows.values[name].numel()].reshape(ROWS, WIDTH)
    assert torch.equal(own, own[:, :1].expand_as(own)) and int(unread.sum()) == int(own.sum())
    return own[:, 0].nonzero().reshape(-1).tolist()


def test_rows_that_no_draw_reads_are_named() -> None:
    assert rows_without_gradient(Words(), ROWS - 3) == [ROWS - 2, ROWS - 1]


def test_where_all_rows_are_read_none_is_named() -> None:
    assert rows_without_gradient(Words(), ROWS - 1) == []


def test_a_row_that_is_proved_out_of_reach_is_not_among_them() -> None:
    either = Words(lambda ids: (ids > 1).to(torch.int64) + 2)  # an index is 2 at least
    assert rows_without_gradient(either, ROWS - 1) == list(range(4, ROWS))


def test_a_table_without_any_effect_has_none() -> None:
    assert rows_without_gradient(Words(weight=0.0), ROWS - 3) == []


def test_a_table_that_a_readout_reads_has_none() -> None:
    assert rows_without_gradient(Words(tied=True), ROWS - 3) == []


@pytest.mark.parametrize(("tied", "looked_up"), [(False, True), (True, False)])
def test_only_a_table_that_nothing_else_reads_is_looked_up(tied: bool, looked_up: bool) -> None:
    graph = canonical(trace(Words(tied=tied).double(), example(0)))
    assert is_looked_up(graph, graph.node_of["table.weight"]) is looked_up


@pytest.mark.parametrize(("centred", "free"), [(False, WIDTH), (True, WIDTH - 1)])
def test_the_account_says_how_much_of_what_is_not_explained_lies_there(centred: bool, free: int) -> None:
    module = Words(lambda ids: ids + 0, norm=nn.LayerNorm(WIDTH) if centred else nn.Identity()).double()
    account, _ = account_of(module, ROWS - 2)  # the last row has no id
    assert account.unread == free  # a law explains the mean of every row that a LayerNorm reads
    assert centred or account.completeness.measured - account.completeness.explained == free
