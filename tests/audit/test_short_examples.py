"""A long example is cut where the model does the same on a short one, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit import short_examples
from deadweight.audit.short_examples import shorten_example
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.source.model import open_model


class Words(nn.Module):
    """A table of positions, attention, and something that may depend on the length."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.extra, self.read, self.odd = nn.Linear(8, 8), nn.Linear(8, 11), odd

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.odd == "long sequences" and ids.shape[1] > 32:
            x = torch.tanh(self.extra(x))
        if self.odd == "whole batches":
            x = x.reshape(4, -1, x.shape[1], 8).sum(1)
        return self.read(x)


IDS = torch.randint(0, 11, (8, 48), generator=torch.Generator().manual_seed(0))


def cut_of(module: nn.Module, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    monkeypatch.setattr(short_examples, "LARGE", 1)
    source = open_model(module, inputs=inputs)
    source, graph = shorten_example(source, canonical(trace(source.module, source.args, source.kwargs)))
    assert [tuple(t.shape) for t in source.args] == [graph.nodes[name].shape for name in graph.inputs]
    return [tuple(t.shape) for t in source.args]


def test_batch_and_sequence_are_cut_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_of(Words(), IDS, monkeypatch) == [(2, 16)]


def test_a_model_that_does_otherwise_on_short_sequences_keeps_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_of(Words("long sequences"), IDS, monkeypatch) == [(2, 48)]


def test_a_model_that_needs_its_batch_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_of(Words("whole batches"), IDS, monkeypatch) == [(8, 16)]


def test_an_axis_of_several_places_does_not_become_one_of_a_single_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along one place everything is constant, and InstanceNorm would ignore it."""
    deep = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(64), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1))
    assert cut_of(deep, torch.randn(1, 3, 256, 256), monkeypatch) == [(1, 3, 256, 256)]
    shallow = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(16), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1))
    assert cut_of(shallow, torch.randn(1, 3, 256, 256), monkeypatch) == [(1, 3, 64, 64)]


def test_a_short_example_gives_the_answer_of_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(short_examples, "LARGE", large)
        audit = deadweight.audit(Words(), IDS)
        result.append({(f.code, f.parameter, f.slice, f.dof, f.verdict) for f in audit.findings})
    assert result[0] == result[1] and result[0]


class Buckets(nn.Module):
    """Keys with a row of a table for every so many positions: for 16 of them all rows may be the same one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.query, self.key = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.kind = nn.Parameter(torch.randn(16, 8) * 0.3), kind

    def forward(self, ids: Tensor) -> Tensor:
        x, place = self.words(ids), torch.arange(ids.shape[1])
        keys, bias = self.key(x), 0.0
        if self.kind == "rows":
            keys = keys + self.table[place // 32]
        if self.kind == "distances":
            bias = self.table[(place[:, None] - place).abs() // 32, 0]
        if self.kind == "window":
            bias = ((place[:, None] - place).abs() < 20) * self.table.sum()
        return torch.softmax(self.query(x) @ keys.transpose(1, 2) + bias, -1) @ x


@pytest.mark.parametrize("kind", ["rows", "distances", "window"])
def test_what_is_constant_in_a_short_example_alone_is_not_called_dead(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(short_examples, "LARGE", large)
        torch.manual_seed(0)
        audit = deadweight.audit(Buckets(kind).double(), torch.randint(0, 7, (2, 96)))
        result.append({(f.code, f.parameter, f.slice, f.dof) for f in audit.findings})
    assert result[0] == result[1]


class Last(nn.Module):
    """An input that points into the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, last: Tensor) -> Tensor:
        return self.read(self.words(ids)[torch.arange(len(ids)), last])


def test_an_input_that_points_beyond_a_short_sequence_keeps_the_sequence_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, last = torch.randint(0, 7, (4, 64)), torch.tensor([60, 63, 10, 40])
    assert cut_of(Last(), (ids, last), monkeypatch)[0] == (2, 64)
    assert deadweight.audit(Last(), (ids, last)).findings
