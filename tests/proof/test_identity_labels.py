"""Elements of stored constants are one number only where whole slices repeat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deadweight
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph, Node
from deadweight.graph.trace import trace
from deadweight.proof.identity_labels import Identity

HEADS, SIZE, LENGTH = 2, 4, 5


class Rotary(nn.Module):
    """Attention with rotary positions from a table that is made once; `table` makes cosines and sines."""

    def __init__(self, table: Tensor, *, persistent: bool = False) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.register_buffer("cos", table.cos(), persistent=persistent)
        self.register_buffer("sin", table.sin(), persistent=persistent)

    def turned(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        first, second = x.chunk(2, -1)
        return x * self.cos[:LENGTH] + torch.cat((-second, first), -1) * self.sin[:LENGTH]

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.turned(self.q(x)) @ self.turned(self.k(x)).mT, -1)
        values = self.v(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return self.o((scores @ values).transpose(1, 2).flatten(2)).tanh()


def angles(rows: int = 9, *, halves: bool = True) -> Tensor:
    """Positions times frequencies, for both halves of every head alike or not."""
    frequencies = torch.tensor([1.0, 0.1, 1.0, 0.1] if halves else [1.0, 0.1, 0.7, 0.3])
    return torch.arange(rows)[:, None] * frequencies


def rotations(module: nn.Module) -> int:
    """Free dimensions of queries and keys; the account must agree."""
    found = deadweight.audit(module, torch.randn(3, LENGTH, HEADS * SIZE), complete=True)
    counted = found.completeness
    assert counted is not None and counted.measured == counted.explained and not counted.unsound
    return dict(counted.by_law).get("DW009", 0)


def test_a_rotary_table_whose_halves_repeat_leaves_scale_and_angle_of_every_plane_free() -> None:
    assert rotations(Rotary(angles())) == HEADS * (SIZE // 2) * 2


def test_a_table_whose_halves_differ_leaves_no_angle_free() -> None:
    assert rotations(Rotary(angles(halves=False))) == HEADS * (SIZE // 2)


def labels(table: Tensor, *, persistent: bool = False) -> Tensor:
    graph = canonical(trace(Rotary(table, persistent=persistent), (torch.randn(3, LENGTH, HEADS * SIZE),)))
    name = next(n for n, value in graph.tensors.items() if value.shape == table.shape)
    return Identity(graph).of(name)


def test_only_whole_slices_that_hold_the_same_numbers_are_one() -> None:
    found = labels(angles())
    assert torch.equal(found[:, :2], found[:, 2:]) and len(found.unique()) == found.numel() // 2
    late = angles()
    late[8, 3] = 2.0  # a position that this example does not reach: no whole column repeats any more
    assert len(labels(late).unique()) == 3 * len(late)


def test_single_equal_numbers_and_a_state_not_yet_written_say_nothing() -> None:
    table = angles()
    assert len({*labels(table)[0].tolist()}) == 2 and bool((table.cos()[0] == 1).all())
    assert len(labels(torch.zeros(9, 4)).unique()) == 36


def test_what_is_stored_with_the_model_may_change() -> None:
    assert len(labels(angles(), persistent=True).unique()) == 36


def labels_of(table: Tensor) -> Tensor:
    """The labels of a constant table in a graph of nothing else."""
    node = Node("table", "buffer", shape=tuple(table.shape), dtype=table.dtype)
    return Identity(Graph({"table": node}, {}, (), {"table": table})).of("table")


def test_a_table_without_rows_has_no_labels() -> None:
    assert labels_of(torch.zeros(0, 4)).shape == (0, 4)


def test_a_table_without_values_has_a_label_for_each_number() -> None:
    assert len(labels_of(angles()).unique()) == angles().numel() // 2
    assert len(labels_of(angles().to("meta")).unique()) == angles().numel()


def test_a_table_of_one_row_or_one_column_has_a_label_for_each_number() -> None:
    assert len(labels_of(torch.tensor([[1.0, 2.0]])).unique()) == 2
    assert len(labels_of(torch.tensor([[1.0], [2.0], [1.0]])).unique()) == 2
