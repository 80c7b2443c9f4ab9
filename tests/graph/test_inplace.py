"""Operations in place: the trace computes what the module computes, also where others see what is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
import deadweight.graph.trace as tracing
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace


class Written(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.function = nn.Linear(4, 4), nn.LayerNorm(4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def view_before(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    view = h[:, 0]
    h.relu_()
    return view


def residual_reads_what_is_written(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    return h + m.norm(F.relu(h, inplace=True))


def read_before_and_after(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    before = h * 2
    h.add_(before).mul_(3)
    return before - h


def through_dropout(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    dropped = F.dropout(h, 0.5, training=False)
    dropped.relu_()
    return h


def through_a_reshape(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h.reshape(-1).relu_()
    return h


def returned_itself(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x).sigmoid_()


def returned_afterwards(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h.relu_()
    return h


def filled_and_returned(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, 1:] = m.a(x)[:, 1:]
    return h


def a_mask_in_slices(m: nn.Module, x: Tensor) -> Tensor:
    mask = torch.zeros(3, 4)
    for number, rows in enumerate((slice(0, 1), slice(-2, None))):
        for columns in (slice(0, 2), slice(2, 4)):
            mask[rows, columns] = number + 1
    mask[1] += 5
    return m.a(x) + mask


def slices_of_a_product(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    before = h * 2
    h[:, 1:] = h[:, 1:] + before[:, 1:]
    h[0, 2:4] *= 3
    return m.norm(h) - before


def a_slice_held_elsewhere(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    part = h[:, :2]
    part.mul_(2)
    return h.sum() + part


def a_triangle_that_is_filled(m: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(3, 4).triu(diagonal=1)
    before = mask * 2
    mask.masked_fill_(mask.bool(), -5.0)
    return m.a(x) + mask + before


def a_number_written_down(m: nn.Module, x: Tensor) -> Tensor:
    return m.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def a_number_written_down_and_then_changed(m: nn.Module, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    before = scale * 1
    scale[1:] += 1
    return m.a(x) * scale + before


def a_triangle_seen_by_a_view(m: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(3, 4).tril()
    row = mask[1]
    mask.masked_fill_(mask == 0, 7.0)
    return m.a(x) + row


CHEAP = [
    residual_reads_what_is_written,
    read_before_and_after,
    returned_itself,
    returned_afterwards,
    filled_and_returned,
    a_mask_in_slices,
    slices_of_a_product,
    a_triangle_that_is_filled,
    a_number_written_down,
]
OTHERS = [
    view_before,
    through_dropout,
    through_a_reshape,
    a_slice_held_elsewhere,
    a_number_written_down_and_then_changed,
    a_triangle_seen_by_a_view,
]


@pytest.mark.parametrize("function", CHEAP + OTHERS)
def test_a_trace_computes_what_is_left_after_writing(function: Callable) -> None:
    module, x = Written(function), torch.randn(3, 4)
    graph = canonical(trace(module, (x,)))
    values = {n: t.detach().double() for n, t in graph.tensors.items()}
    (result,) = evaluate(graph, values, {graph.inputs[0]: x.double()})
    assert torch.allclose(result, module.double()(x.double()), rtol=0, atol=1e-14)  # a few roundings


@pytest.mark.parametrize("function", CHEAP)
def test_writing_to_a_value_of_ones_own_is_not_traced_twice(
    function: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = []
    needs = tracing.needs_lowering
    monkeypatch.setattr(tracing, "needs_lowering", lambda program: lowered.append(needs(program)) or lowered[-1])
    trace(Written(function), (torch.randn(3, 4),))
    assert lowered == [False]


def test_what_fills_the_tensor_that_is_returned_is_not_called_unused() -> None:
    result = deadweight.audit(Written(filled_and_returned), (torch.randn(3, 4),))
    dead = {f.parameter: f.dof for f in result.findings if f.code == "DW001"}
    assert "a.weight" not in dead or dead["a.weight"] == 4  # the row of the first output, which is overwritten
    assert not any(u.why.startswith("unexplained: 16") for u in result.unknown)
