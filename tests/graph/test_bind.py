"""Inputs find their nodes by name or order, or are refused in one line."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import trace
from deadweight.source.inputs import as_inputs

Pair = namedtuple("Pair", "a b")
X, MASK = torch.randn(3, 4), torch.tensor([True, False, True])


class Many(nn.Module):
    """Takes what it is given, however it is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any, mask: Any = None, flag: bool = True, extra: Any = None) -> Tensor:
        first = x["a"][0] if isinstance(x, dict) else x.a if isinstance(x, Pair) else x
        out = self.layer(first)
        out = out if mask is None else out * mask[:, None]
        out = out if extra is None else out + extra["more"][1]
        return out if flag else -out


GIVEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one tensor": ((X,), {}),
    "a boolean tensor": ((X, MASK), {}),
    "by keyword, in another order": ((), {"mask": MASK, "x": X}),
    "none and a flag": ((X, None, False), {}),
    "a nested dict": (({"a": [X, None]},), {"mask": MASK}),
    "a named tuple": ((Pair(X, 3),), {"flag": False}),
    "nested keywords": ((X,), {"extra": {"more": [None, X]}, "mask": MASK}),
}


@pytest.mark.parametrize(("args", "kwargs"), GIVEN.values(), ids=list(GIVEN))
def test_nested_inputs_reach_their_nodes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module = Many()
    graph = trace(module, args, kwargs)
    (result,) = evaluate(graph, graph.tensors, bind(graph, args, kwargs))
    torch.testing.assert_close(result.float(), module(*args, **kwargs))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X, MASK), "found 2 input tensors; expected 1"),
        ((), "found 0 input tensors; expected 1"),
        ((torch.randn(2, 4),), r"input x has shape \(2, 4\); expected \(3, 4\)"),
        ((torch.ones(3, 4, dtype=torch.long),), "input x has dtype torch.int64; expected torch.float32"),
    ],
)
def test_inputs_unlike_the_example_are_refused(args: tuple[Any, ...], words: str) -> None:
    graph = trace(Many(), (X,))
    with pytest.raises(DeadweightError, match=words):
        bind(graph, args, {})


@dataclass
class Batch:
    x: Tensor
    size: int = 3


@pytest.mark.parametrize("given", [(Batch(X),), {"batch": Batch(X)}], ids=["positional", "keyword"])
def test_tensors_in_an_unknown_class_are_refused_with_what_to_do(given: Any) -> None:
    with pytest.raises(DeadweightError, match=r"Batch that holds tensors \(x\).*register_dataclass"):
        as_inputs(given)


def test_an_unknown_class_without_tensors_is_an_input_like_a_number() -> None:
    settings = Batch(None)  # type: ignore[arg-type]
    assert as_inputs((X, settings)).args[1] is settings
