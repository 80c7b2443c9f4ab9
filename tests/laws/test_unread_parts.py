"""Rows of weights and elements of biases whose results are cut away before anything computes with them (DW001)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deadweight

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 11, 6, generator=GENERATOR)
IDS = torch.randint(7, (2, 7), generator=GENERATOR)
EVEN = [0, 2, 4]


class Cut(nn.Module):
    """A linear map of eight channels, and what becomes of them."""

    def __init__(self, forward: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.map, self.cut = nn.Linear(6, width), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.map(x))


UNREAD = {
    "slice": (lambda h: h[..., :3].tanh(), 5),
    "unused part of a split": (lambda h: h.split([4, 3, 1], -1)[1].tanh(), 5),
    "two of three chunks": (lambda h: (p := h.narrow(-1, 0, 6).chunk(3, -1))[0] * p[2], 4),
    "one channel": (lambda h: h.select(-1, 2).tanh(), 7),
    "fixed choice": (lambda h: h[..., EVEN].tanh(), 5),
    "behind an activation and a scale": (lambda h: (2 * h.sigmoid() + 1)[..., 1:].mean(1), 1),
    "behind heads": (lambda h: h.unflatten(-1, (4, 2)).transpose(1, 2)[:, :3].tanh().flatten(2), 2),
    "joined and cut again": (lambda h: torch.cat([h.sin(), h.cos()], -1)[..., 2:14:3].tanh(), 4),
    "windows": (lambda h: h.unfold(-1, 3, 3).exp(), 2),
    "read on one of two ways": (lambda h: h[..., :2].sin() + h[..., 1:3].cos(), 5),
    "behind a mask": (lambda h: h.masked_fill(torch.arange(8) > 5, 0.0)[..., :6].tanh(), 2),
}


@pytest.mark.parametrize(("forward", "rows"), UNREAD.values(), ids=list(UNREAD))
def test_what_is_cut_away_is_unused(examine, forward: Callable, rows: int) -> None:
    result = examine(Cut(forward), X)
    assert sum(f.dof for f in result.found("DW001", "map.weight")) == 6 * rows
    assert sum(f.dof for f in result.found("DW001", "map.bias")) == rows


READ = {
    "all of it": torch.tanh,
    "by a norm before the cut": lambda h: nn.functional.layer_norm(h, (8,))[..., :3],
    "by a softmax before the cut": lambda h: h.softmax(-1)[..., :3],
    "by the other part": lambda h: h[..., :3] + h[..., 3:].mean(-1, keepdim=True),
    "by a product of its channels": lambda h: (h @ h.transpose(1, 2))[..., :2],
    "by a rotation of its halves": lambda h: torch.cat([-h[..., 4:], h[..., :4]], -1).tanh(),
    "in the order of another axis": lambda h: h.reshape(2, 8, 11)[..., :3].tanh(),
}


@pytest.mark.parametrize("forward", READ.values(), ids=list(READ))
def test_what_something_reads_is_used(examine, forward: Callable) -> None:
    assert examine(Cut(forward), X).dof("DW001") == 0


def test_channels_cut_to_the_length_of_the_input_are_read_by_longer_inputs(examine) -> None:
    for length, unread in ((3, 0), (5, 3 * 7)):  # five outputs are no size of an input of eleven tokens
        x = torch.randn(2, length if unread == 0 else 11, 6, generator=GENERATOR)
        assert examine(Cut(lambda h, n=length: h[..., :n].softmax(-1)), x).dof("DW001") == unread


class Positions(nn.Module):
    """Embeddings with a table of positions, longer than the input, and a head whose last outputs nobody reads."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 4), nn.Parameter(torch.randn(9, 4, generator=GENERATOR))
        self.head, self.outputs = nn.Linear(4, 6, bias=False), outputs

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions[: ids.shape[1]]
        return self.head(h.tanh())[..., : self.outputs]


def test_a_table_of_positions_is_not_called_unused_where_the_input_ends(examine) -> None:
    result = examine(Positions(outputs=2), IDS)
    assert not result.found("DW001", "positions")
    assert sum(f.dof for f in result.found("DW001", "head.weight")) == 4 * 4


class LastToken(nn.Module):
    """Only the last token is returned; every token is mixed into it before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).cumsum(1).tanh())[:, -1]


def test_tokens_that_are_not_returned_leave_every_weight_in_use(examine) -> None:
    assert examine(LastToken(), X).dof("DW001") == 0


def test_a_bias_that_folds_is_not_called_unused_too(examine) -> None:
    """Value bias and output weight: all of the bias folds, also the channel that nothing reads."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.out = nn.Linear(6, 4), nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            mixed = (x @ x.transpose(1, 2)).softmax(-1) @ self.value(x)
            return self.out(mixed[..., :3])[..., :4]

    result = examine(Attention(), X)
    assert sum(f.dof for f in result.found("DW003", "value.bias")) == 4
    assert not result.found("DW001", "value.bias")
    assert sum(f.dof for f in result.found("DW001", "value.weight")) == 6
    assert sum(f.dof for f in result.found("DW001", "out.weight")) == 2 * 3
    assert sum(f.dof for f in result.found("DW001", "out.bias")) == 2


def test_frozen_integers_are_not_examined() -> None:
    class Counted(Cut):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.steps = nn.Parameter(torch.arange(8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.map(x) + self.steps)[..., :3].tanh()

    assert Counted()(X).shape == (2, 11, 3)
    found = deadweight.audit(Counted(), (X,)).findings
    assert {f.parameter for f in found if f.code == "DW001"} == {"map.weight", "map.bias"}
