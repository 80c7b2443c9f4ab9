"""Complex products and tensors that are filled slice by slice, spelled out in operations that have rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace

X = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.gain = function, nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.gain * x)


def graph_of(function: Callable[[Tensor], Tensor]) -> Graph:
    """The canonical graph, which must compute what the module does."""
    module = Function(function)
    graph = canonical(trace(module, (X,)))
    with torch.no_grad():
        out, *_ = evaluate(graph, dict(graph.tensors), {graph.inputs[0]: X})  # then masks of data that decide shapes
    assert torch.allclose(out, module(X), rtol=0, atol=1e-13)  # a few products of numbers of order one
    return graph


def ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes.values()}


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    turned = torch.view_as_complex(x.unflatten(-1, (3, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def squared(x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (3, 2)))
    return torch.view_as_real(numbers * numbers.roll(1, 1)).flatten(-2)


def added(x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (3, 2)))
    return torch.view_as_real(numbers + numbers.roll(1, 1)).flatten(-2)


@pytest.mark.parametrize("function", [rotated, squared])
def test_a_product_of_complex_numbers_is_one_of_real_numbers(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    complex_data = [n for n in graph.nodes.values() if n.dtype is not None and n.dtype.is_complex]
    assert {"aten.stack", "aten.sub", "aten.add"} <= ops(graph)
    assert function is squared or not any(graph.depends[n.name][0] for n in complex_data)


def test_other_complex_operations_stay_what_they_are() -> None:
    assert "aten.view_as_complex" in ops(graph_of(added))


def filled(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    out[..., :2] = x[..., 4:]
    out[..., 2:] = x[..., :4].sin()
    return out


def filled_backwards(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 3:] = x[:, :2]
    out[:, :3] = x[:, 2:].cos()
    return out


def filled_in_part(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    out[..., :2] = x[..., 4:]
    out[..., 2:5] = x[..., :3].sin()
    return out


def filled_over(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    out[..., :4] = x[..., 2:]
    out[..., 2:] = x[..., :4].sin()
    return out


def filled_by_repeats(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    out[..., :2] = x[:, :1, 4:]
    out[..., 2:] = x[..., :4].sin()
    return out


@pytest.mark.parametrize("function", [filled, filled_backwards])
def test_slices_that_cover_a_tensor_are_joined(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    assert "aten.cat" in ops(graph) and "aten.slice_scatter" not in ops(graph)


@pytest.mark.parametrize("function", [filled_in_part, filled_over])
def test_slices_that_leave_something_or_overlap_are_not_joined(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    assert "aten.slice_scatter" in ops(graph) and "aten.cat" not in ops(graph)


def test_a_slice_that_repeats_what_is_written_is_still_the_same_function() -> None:
    graph_of(filled_by_repeats)


def filled_step_by_step(x: Tensor) -> Tensor:
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        out[:, t] = state
    return out


def filled_twice_at_one_step(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    for place, t in enumerate((3, 0, -1, 2, -2, 1)):  # -2 is 3
        out[:, t] = x[:, t] + place
    return out


def filled_but_for_one_step(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(1, x.shape[1]):
        out[:, t] = x[:, t - 1]
    return out


def filled_along_two_axes(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(4):
        out[:, t] = x[:, t].sin()
    out[1] = x[0]
    return out


def filled_with_whole_numbers(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.int64)
    for t in range(x.shape[1]):
        out = torch.select_scatter(out, torch.full_like(x[:, t], 0.5 + t), 1, t)
    return out + x


def filled_with_choices(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.int64)
    for t in range(x.shape[1]):
        out[:, t] = (x[:, t] > 0).long()
    return out + x


@pytest.mark.parametrize("function", [filled_step_by_step, filled_twice_at_one_step, filled_with_choices])
def test_steps_that_cover_a_tensor_are_stacked(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    assert "aten.stack" in ops(graph) and "aten.select_scatter" not in ops(graph)


@pytest.mark.parametrize("function", [filled_but_for_one_step, filled_along_two_axes, filled_with_whole_numbers])
def test_steps_that_leave_something_or_round_are_not_stacked(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    assert "aten.select_scatter" in ops(graph) and "aten.stack" not in ops(graph)


@pytest.mark.parametrize(
    "function", [lambda x: x.mT.sin().mT, lambda x: x.mT.mT, lambda x: x.permute(1, 2, 0).permute(2, 0, 1)]
)
def test_an_order_of_axes_that_undoes_another_is_dropped(function: Callable[[Tensor], Tensor]) -> None:
    left = sum(n.op in ("aten.permute", "aten.transpose") for n in graph_of(function).nodes.values())
    assert left == (2 if "sin" in function.__code__.co_names else 0)


def test_an_order_of_axes_that_does_not_undo_another_stays() -> None:
    graph_of(lambda x: x.permute(1, 2, 0).permute(1, 2, 0))
    assert "aten.permute" in ops(graph_of(lambda x: x.permute(1, 2, 0).permute(1, 2, 0)))


def test_a_matrix_before_columns_that_were_rows_needs_no_order() -> None:
    found = [n for n in matrix_graph(lambda w, x: w @ x.mT, 6, 6).nodes.values() if n.op == "aten.permute"]
    assert len(found) == 1  # of the result


def masked_over(x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = values
    return out


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.ones(2) * 0 == 0].sin(),
        lambda x: x[torch.ones(2, 5) * 0 == 0].sin(),
        lambda x: masked_over(x, torch.ones(2) * 0 == 0, x.cos()),
        lambda x: masked_over(x, torch.ones(2, 5) * 0 == 0, x[0, 0].cos()),
    ],
)
def test_a_mask_that_is_true_everywhere_picks_everything(function: Callable[[Tensor], Tensor]) -> None:
    assert not {"aten.index", "aten.index_put"} & ops(graph_of(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.arange(2) < 1],  # not everywhere
        lambda x: x[torch.arange(2) < 2],  # not for a longer example
        lambda x: x[torch.ones(2, dtype=torch.int64)],  # no mask
        lambda x: x[:, torch.ones(5) == 1],  # another axis
        lambda x: x[:1][torch.ones(1) == 1, torch.ones(5) == 1],  # two masks
        lambda x: x[x[:, 0, 0] < 9],  # data
        lambda x: torch.index_put(x, [torch.ones(2) == 1], x.cos(), accumulate=True),
    ],
)
def test_any_other_index_stays(function: Callable[[Tensor], Tensor]) -> None:
    assert {"aten.index", "aten.index_put"} & ops(graph_of(function))


class Matrix(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


def matrix_graph(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Graph:
    module = Matrix(function, *shape)
    graph = canonical(trace(module, (X,)))
    (out,) = evaluate(graph, dict(graph.tensors), {graph.inputs[0]: X})
    assert torch.allclose(out, module(X), rtol=0, atol=1e-13)  # sums of six products of order one
    return graph


def matrix_ops(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> set[str]:
    return ops(matrix_graph(function, *shape))


@pytest.mark.parametrize("product", [lambda w, x: w @ x.mT, lambda w, x: w.T @ x.mT, lambda w, x: w @ x[0].T])
def test_a_matrix_before_columns_is_a_linear_map(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = matrix_ops(product, 6, 6)
    assert "linear" in found and "aten.matmul" not in found


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (lambda w, x: torch.tanh(w) @ x.mT, (6, 6)),  # a function of the matrix
        (lambda w, x: w @ x.mT, (2, 4, 6)),  # a matrix for each batch
        (lambda w, x: w @ x[0, 0], (4, 6)),  # a vector
    ],
)
def test_any_other_product_is_none(product: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    assert "linear" not in matrix_ops(product, *shape)


def decayed(x: Tensor, start: Callable[[Tensor], Tensor]) -> Tensor:
    state = start(x[:, 0])
    for step in x.unbind(1):
        state = torch.sigmoid(step) * state + step
    return state


def test_a_recurrence_that_starts_at_zero_starts_with_its_first_step() -> None:
    assert not ops(graph_of(lambda x: decayed(x, torch.zeros_like))) & {"aten.zeros", "aten.full"}


def test_a_recurrence_that_starts_at_one_does_not() -> None:
    assert "aten.full" in ops(graph_of(lambda x: decayed(x, torch.ones_like)))


FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x + torch.zeros_like(x).cumsum(-1),
    "ones": lambda x: x * torch.ones_like(x).cumsum(-1),
    "whole numbers": lambda x: x * torch.ones_like(x, dtype=torch.int64).cumsum(-1),
    "any number": lambda x: x * torch.full_like(x, 2.5).cumsum(-1),
    "of another shape": lambda x: x * x.new_ones(6).cumsum(-1) + x.new_zeros(5, 1).cumsum(0),
}


@pytest.mark.parametrize("function", FILLED.values(), ids=list(FILLED))
def test_a_tensor_of_one_number_reads_nothing(function: Callable[[Tensor], Tensor]) -> None:
    graph = graph_of(function)
    filled = [node.name for node in graph.nodes.values() if node.op == "aten.full"]
    assert filled and all(graph.depends[name] == (False, False) for name in filled)


EMPTY: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and how many concatenations are left
    "of another rank, as torch.cat allows": (lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x], 1), 0),
    "along the axis": (lambda x: torch.cat([x[:, :0], x], dim=1), 0),
    "beside two others": (lambda x: torch.cat([x[:, :0], x, x.sin()], dim=1), 1),
    "of another type, which the result takes": (
        lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x.sign().long()], 1) * x,
        1,
    ),
    "none": (lambda x: torch.cat([x, x.sin()], 1), 1),
}


@pytest.mark.parametrize(("function", "left"), EMPTY.values(), ids=list(EMPTY))
def test_an_empty_operand_of_a_concatenation_is_dropped(function: Callable[[Tensor], Tensor], left: int) -> None:
    graph = graph_of(function)
    joined = [n for n in graph.nodes.values() if n.op == "aten.cat"]
    assert len(joined) == left and graph.nodes[graph.outputs[0]].dtype == torch.float64


class Cached(nn.Module):
    """Attention that joins its keys to those of a cache, which is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (torch.cat([torch.tensor([]), part(x)], 1) for part in (self.key, self.value))
        return (self.query(x) @ keys.mT).softmax(-1) @ values


def test_attention_with_an_empty_cache_gets_its_laws() -> None:
    codes = {finding.code for finding in deadweight.audit(Cached(), X.float()).findings}
    assert {"DW002", "DW009"} <= codes
