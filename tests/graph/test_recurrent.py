"""Recurrent layers in the canonical vocabulary compute what the module computes, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph, Node
from deadweight.graph.trace import trace

CLOSE = 1e-12  # sums of a few numbers of order one round at about 1e-16
BATCH, STEPS, WIDTH, HIDDEN = 2, 5, 3, 4
VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 3, "bias": False, "bidirectional": True},
]
LAYERS = [(kind, options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for options in VARIANTS]
LAYERS += [(nn.LSTM, {"proj_size": 2, **options}) for options in VARIANTS]
LAYERS += [(nn.RNN, {"nonlinearity": "relu", **options}) for options in VARIANTS]
IDS = [f"{kind.__name__}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for kind, options in LAYERS]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def states(module: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Initial states for two sequences."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    hidden = random(count, BATCH, module.proj_size or HIDDEN)
    return (hidden, random(count, BATCH, HIDDEN)) if isinstance(module, nn.LSTM) else hidden


def sequences(module: Any) -> Tensor:
    return random(BATCH, STEPS, WIDTH) if module.batch_first else random(STEPS, BATCH, WIDTH)


def same_function(module: nn.Module, *inputs: Any) -> Graph:
    graph = canonical(trace(module, inputs))
    assert not [n for n in graph.nodes.values() if n.op.removeprefix("aten.").partition("_")[0] in ("lstm", "gru")]
    wanted = [t for t in pytree.tree_leaves(module(*inputs)) if isinstance(t, Tensor)]

    def as_noted(node: Node, value: Any) -> Any:
        assert not isinstance(value, Tensor) or tuple(value.shape) == node.shape, node
        return value

    result = evaluate(graph, graph.tensors, bind(graph, inputs, {}), as_noted)
    for expected, value in zip(wanted, result, strict=True):
        assert expected.shape == value.shape
        assert float((expected - value).detach().abs().max()) < CLOSE
    return graph


@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=IDS)
@pytest.mark.parametrize("given", [False, True], ids=["from zero", "from given states"])
def test_a_recurrent_layer_keeps_its_function(kind: Any, options: dict[str, Any], given: bool) -> None:
    module = kind(WIDTH, HIDDEN, **options).double()
    same_function(module, sequences(module), *([states(module)] if given else []))


class Packed(nn.Module):
    """Sequences of different lengths, the shorter one first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, STEPS], batch_first=True, enforce_sorted=False)
        outputs, last = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)[0], last


PACKED = [(kind, options) for kind, options in LAYERS if options.get("bidirectional") or not options]


@pytest.mark.parametrize(("kind", "options"), PACKED, ids=str)
def test_packed_sequences_keep_their_function(kind: Any, options: dict[str, Any]) -> None:
    module = Packed(kind(WIDTH, HIDDEN, **{**options, "batch_first": True})).double()
    same_function(module, random(BATCH, STEPS, WIDTH))


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_recurrent_cell_keeps_its_function(kind: Any, bias: bool) -> None:
    module = kind(WIDTH, HIDDEN, bias=bias).double()
    hidden = random(BATCH, HIDDEN)
    state = (hidden, random(BATCH, HIDDEN)) if kind is nn.LSTMCell else hidden
    same_function(module, random(BATCH, WIDTH))
    same_function(module, random(BATCH, WIDTH), state)
    same_function(module, random(WIDTH))


def test_a_relu_cell_keeps_its_function() -> None:
    same_function(nn.RNNCell(WIDTH, HIDDEN, nonlinearity="relu").double(), random(BATCH, WIDTH), random(BATCH, HIDDEN))


def test_a_sequence_without_a_batch_keeps_its_function() -> None:
    same_function(nn.GRU(WIDTH, HIDDEN, bidirectional=True).double(), random(STEPS, WIDTH))


def test_the_graph_does_not_grow_with_the_sequence() -> None:
    module = nn.LSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True).double()
    short, long = (canonical(trace(module, (random(steps, BATCH, WIDTH),))) for steps in (2, 1000))
    assert len(short.nodes) == len(long.nodes)


def test_dropout_between_layers_stays_in_training_alone() -> None:
    module = nn.GRU(WIDTH, HIDDEN, num_layers=3, dropout=0.5).double()
    x = random(STEPS, BATCH, WIDTH)
    training, evaluating = (canonical(trace(module.train(mode), (x,))) for mode in (True, False))
    assert [n.op for n in training.nodes.values()].count("aten.dropout") == 2
    assert [n.op for n in evaluating.nodes.values()].count("aten.dropout") == 0
    same_function(module.eval(), x)


def test_a_recurrence_can_be_differentiated_forwards_and_backwards() -> None:
    for module in (nn.LSTM(WIDTH, HIDDEN), nn.GRU(WIDTH, HIDDEN), nn.RNN(WIDTH, HIDDEN, nonlinearity="relu")):
        graph = canonical(trace(module.double(), (random(STEPS, BATCH, WIDTH),)))
        inputs = {graph.inputs[0]: random(STEPS, BATCH, WIDTH)}
        values = {n: t.detach() for n, t in graph.tensors.items()}
        name = graph.node_of["weight_hh_l0"]

        def function(weight: Tensor, graph=graph, values=values, inputs=inputs, name=name) -> Tensor:
            return evaluate(graph, {**values, name: weight}, inputs)[0].sum()

        tangent = torch.randn_like(values[name])
        forwards = torch.func.jvp(function, (values[name],), (tangent,))[1]
        backwards = (torch.func.grad(function)(values[name]) * tangent).sum()
        assert abs(float(forwards - backwards)) < CLOSE
