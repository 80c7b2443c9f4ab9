"""Recurrent layers as linear maps, biases, and one operation that loops over time.

Per layer and direction: the input projection of the whole sequence is a `linear`, the two biases of a gate are one
`add` of parameters, and `recurrent.lstm`, `recurrent.gru`, `recurrent.rnn_tanh` or `recurrent.rnn_relu` is the loop.
The number of nodes does not grow with the length of the sequence. A single cell is spelled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deadweight.graph.filled import is_zeros
from deadweight.graph.node import Argument, Node, Operation, Ref
from deadweight.graph.operations import (
    ADD,
    CAT,
    DROPOUT,
    GETITEM,
    LINEAR,
    MUL,
    SELECT,
    SLICE,
    STACK,
    SUB,
    TRANSPOSE,
    ZEROS,
)
from deadweight.graph.recurrences import PACKING, RECURRENT
from deadweight.graph.rewriting import Canonicaliser, arguments_as, arguments_by_name, rewrites

SIGMOID = Operation("aten.sigmoid", torch.ops.aten.sigmoid.default)
TANH = Operation("aten.tanh", torch.ops.aten.tanh.default)
RELU = Operation("aten.relu", torch.ops.aten.relu.default)


@dataclass(frozen=True)
class RecurrentLayers:
    """What aten.lstm, gru and rnn are given, by the names of their schemas.

    Packed sequences are called `data`, and come with the number of sequences at each time step (`batch_sizes`).
    """

    hx: Ref | list[Ref]
    params: list[Ref]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    input: Ref | None = None
    data: Ref | None = None
    batch_sizes: Ref | None = None

    @property
    def sequence(self) -> Ref:
        sequence = self.input or self.data
        assert sequence is not None
        return sequence

    @property
    def n_directions(self) -> int:
        return 2 if self.bidirectional else 1


@dataclass(frozen=True)
class RecurrentCell:
    """What aten.lstm_cell, gru_cell and rnn_cell are given, by the names of their schemas."""

    input: Ref
    hx: Ref | list[Ref]
    w_ih: Ref
    w_hh: Ref
    b_ih: Ref | None = None
    b_hh: Ref | None = None

    @property
    def parameters(self) -> LayerParameters:
        return LayerParameters(self.w_ih, self.w_hh, self.b_ih, self.b_hh)


def as_list(states: Ref | list[Ref]) -> list[Ref]:
    return states if isinstance(states, list) else [states]


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer in one direction; `projection` is W_hr."""

    input: Ref
    hidden: Ref
    input_bias: Ref | None = None
    hidden_bias: Ref | None = None
    projection: Ref | None = None


@dataclass(frozen=True)
class Direction:
    """One layer in one direction: its parameters, its initial state, and how it loops over time."""

    parameters: LayerParameters
    start: list[Ref]
    axis: int
    reverse: bool
    sizes: Ref | None


@dataclass
class NodeWriter:
    """Writes the nodes that stand for one recurrent operation, in the dtype of `like`."""

    make: Canonicaliser
    prefix: str
    like: Node

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.make.shape(ref)

    def emit(self, name: str, operation: Operation, shape: Sequence[int], *args: Argument) -> Ref:
        return self.make.emit(f"{self.prefix}_{name}", operation, args, tuple(shape), self.like)

    def once(self, name: str, operation: Operation, shape: Sequence[int], *args: Argument) -> Ref:
        """A value that depends on parameters alone: written once, however often the layer is called."""
        if name not in self.make.nodes:
            self.make.emit(name, operation, args, tuple(shape), self.like)
        return Ref(name)

    def linear(self, name: str, x: Ref, weight: Ref) -> Ref:
        shape = (*self.shape(x)[:-1], self.shape(weight)[0])
        return self.emit(name, LINEAR, shape, x, weight)

    def add(self, name: str, a: Ref, b: Ref) -> Ref:
        return self.emit(name, ADD, self.shape(a), a, b)

    def plus(self, name: str, a: Ref, b: Ref | None) -> Ref:
        return a if b is None else self.add(name, a, b)

    def multiply(self, name: str, a: Ref, b: Ref) -> Ref:
        return self.emit(name, MUL, self.shape(a), a, b)

    def apply(self, name: str, function: Operation, x: Ref) -> Ref:
        return self.emit(name, function, self.shape(x), x)

    def columns(self, name: str, x: Ref, count: int) -> list[Ref]:
        """Equal parts of the last axis."""
        shape = self.shape(x)
        size = shape[-1] // count
        slices = [(k * size, (k + 1) * size) for k in range(count)]
        return [self.emit(f"{name}{a}", SLICE, (*shape[:-1], size), x, -1, a, b) for a, b in slices]

    def join(self, name: str, parts: list[Ref]) -> Ref:
        """Concatenate along the last axis."""
        shape = self.shape(parts[0])
        width = sum(self.shape(part)[-1] for part in parts)
        return parts[0] if len(parts) == 1 else self.emit(name, CAT, (*shape[:-1], width), parts, -1)

    def sum_once(self, a: Ref, b: Ref) -> Ref:
        return self.once(f"{a.name}_plus_{b.name}", ADD, self.shape(a), a, b)

    def slice_once(self, vector: Ref, start: int, stop: int) -> Ref:
        return self.once(f"{vector.name}_{start}_{stop}", SLICE, (stop - start,), vector, 0, start, stop)


def both_biases(write: NodeWriter, parameters: LayerParameters) -> Ref | None:
    """LSTM and plain RNN: both biases are added to the same pre-activation."""
    if parameters.input_bias is None or parameters.hidden_bias is None:
        return parameters.input_bias or parameters.hidden_bias
    return write.sum_once(parameters.input_bias, parameters.hidden_bias)


def gru_biases(write: NodeWriter, parameters: LayerParameters) -> tuple[Ref | None, Ref | None]:
    """The bias that is added to the gates, and b_hn, which stays apart because the reset gate multiplies it."""
    x, h = parameters.input_bias, parameters.hidden_bias
    if x is None or h is None:
        return None, None
    width = write.shape(h)[0]
    gates = 2 * width // 3
    both = write.sum_once(write.slice_once(x, 0, gates), write.slice_once(h, 0, gates))
    parts = [both, write.slice_once(x, gates, width)]
    bias = write.once(f"{x.name}_with_{h.name}", CAT, (width,), parts, 0)
    return bias, write.slice_once(h, gates, width)


@rewrites("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def split_recurrent(make: Canonicaliser, node: Node) -> tuple[Ref, ...]:
    """Layer by layer: both directions read the same sequence, and their outputs are concatenated."""
    layers = arguments_as(RecurrentLayers, node)
    x, states = layers.sequence, as_list(layers.hx)
    results: list[list[Ref]] = []  # per layer and direction: the outputs, then the last state
    for number, parameters in enumerate(parameters_by_layer(layers)):
        layer, reverse = divmod(number, layers.n_directions)
        write = NodeWriter(make, f"{node.name}_l{layer}{'_reverse' * reverse}", make.nodes[x.name])
        start = [initial_state(write, state, number) for state in states]
        axis = 1 if layers.batch_first else 0
        direction = Direction(parameters, start, axis, bool(reverse), layers.batch_sizes)
        results.append(write_direction(write, node.op, x, direction))
        if reverse == layers.n_directions - 1:
            x = write.join("both", [outputs for outputs, *_ in results[-layers.n_directions :]])
            if layers.train and layers.dropout and layer < layers.num_layers - 1:
                x = write.emit("dropout", DROPOUT, write.shape(x), x, layers.dropout, True)
    return x, *(stack(write, f"last{k}", list(last)) for k, last in enumerate(list(zip(*results, strict=True))[1:]))


def parameters_by_layer(layers: RecurrentLayers) -> list[LayerParameters]:
    each = len(layers.params) // (layers.num_layers * layers.n_directions)
    result = []
    for k in range(0, len(layers.params), each):
        own = layers.params[k : k + each]
        biases = (own[2], own[3]) if layers.has_biases else (None, None)
        result.append(LayerParameters(own[0], own[1], biases[0], biases[1], own[-1] if each % 2 else None))
    return result


def initial_state(write: NodeWriter, states: Ref, number: int) -> Ref:
    """The initial state of one layer and direction."""
    shape = write.shape(states)[1:]
    if is_zeros(write.make, states):
        return zeros(write, shape)
    return write.emit(f"start_{states.name}", SELECT, shape, states, 0, number)


def zeros(write: NodeWriter, shape: tuple[int, ...]) -> Ref:
    return write.emit(f"zeros{'x'.join(map(str, shape))}", ZEROS, shape, list(shape))


def stack(write: NodeWriter, name: str, parts: list[Ref]) -> Ref:
    return write.emit(name, STACK, (len(parts), *write.shape(parts[0])), parts, 0)


def write_direction(write: NodeWriter, op: str, x: Ref, direction: Direction) -> list[Ref]:
    """The sequence of hidden states, and the last state."""
    parameters = direction.parameters
    gates = write.linear("gates", x, parameters.input)
    if op == "aten.gru":
        bias, new_bias = gru_biases(write, parameters)
        gates = write.plus("biased", gates, bias)
        return write_loop(write, "recurrent.gru", gates, direction, [parameters.hidden, new_bias])
    gates = write.plus("biased", gates, both_biases(write, parameters))
    if parameters.projection is not None:
        return write_projected(write, gates, direction, parameters.projection)
    arguments = [parameters.hidden, None] if op == "aten.lstm" else [parameters.hidden]
    return write_loop(write, op.replace("aten", "recurrent"), gates, direction, arguments)


def write_loop(write: NodeWriter, op: str, gates: Ref, direction: Direction, arguments: list[Argument]) -> list[Ref]:
    """One operation for all time steps, and its results by number; `arguments` come after the gates and the state."""
    name, start = f"{write.prefix}_steps", direction.start
    loop = RECURRENT[op](direction.axis, direction.reverse)
    write.make.nodes[name] = Node(
        name, op, loop, (gates, *start, *arguments, direction.sizes), origin=write.like.origin
    )
    shapes = [(*write.shape(gates)[:-1], write.shape(start[0])[-1]), *(write.shape(state) for state in start)]
    return [write.emit(f"result{k}", GETITEM, shape, Ref(name), k) for k, shape in enumerate(shapes)]


def write_projected(write: NodeWriter, gates: Ref, direction: Direction, projection: Ref) -> list[Ref]:
    """An LSTM with W_hr loops over m, the vectors before the projection: W_hh·h = (W_hh·W_hr)·m, and h = W_hr·m.

    So W_hr writes a space that W_hh and all later layers read as ordinary linear maps. A given initial state h has no
    m: W_hh·h is added to the gates of the first time step.
    """
    hidden, cell = direction.start
    weight_hidden = direction.parameters.hidden
    small, wide = write.shape(projection)
    columns = write.once(f"{projection.name}_t", TRANSPOSE, (wide, small), projection)
    product = write.linear("product", columns, weight_hidden)
    weight = write.emit("weight", TRANSPOSE, (write.shape(weight_hidden)[0], wide), product)
    from_zero = is_zeros(write.make, hidden)
    first = None if from_zero else write.linear("first", hidden, weight_hidden)
    before = replace(direction, start=[zeros(write, write.shape(cell)), cell])
    outputs, last, last_cell = write_loop(write, "recurrent.lstm", gates, before, [weight, first])
    return [write.linear("projected", outputs, projection), write.linear("last", last, projection), last_cell]


@rewrites("aten._pack_padded_sequence", "aten._pad_packed_sequence")
def plain_packing(make: Canonicaliser, node: Node) -> Ref:
    """Packing as operations that have forward-mode derivatives too."""
    op = "recurrent.pack" if "pack_padded" in node.op else "recurrent.pad"
    name = f"{node.name}_plain"
    make.nodes[name] = Node(name, op, PACKING[op], tuple(arguments_by_name(node).values()), origin=node.origin)
    return Ref(name)


@rewrites("aten.lstm_cell")
def lstm_cell(make: Canonicaliser, node: Node) -> tuple[Ref, ...]:
    """c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c)."""
    given = arguments_as(RecurrentCell, node)
    _, cell = as_list(given.hx)
    write = NodeWriter(make, node.name, make.nodes[given.input.name])
    gates = write.columns("gate", pre_activation(write, given), 4)
    enter, forget, leave = (write.apply(f"open{k}", SIGMOID, gates[k]) for k in (0, 1, 3))
    new = write.apply("new", TANH, gates[2])
    kept, entered = write.multiply("kept", forget, cell), write.multiply("entered", enter, new)
    after = write.add("cell", kept, entered)
    return write.multiply("hidden", leave, write.apply("seen", TANH, after)), after


@rewrites("aten.gru_cell")
def gru_cell(make: Canonicaliser, node: Node) -> Ref:
    """h ← n + z·(h − n), n = tanh(x_n + r·(W_hn·h + b_hn))."""
    given = arguments_as(RecurrentCell, node)
    (hidden,) = as_list(given.hx)
    write = NodeWriter(make, node.name, make.nodes[given.input.name])
    bias, new_bias = gru_biases(write, given.parameters)
    gates = write.linear("gates", given.input, given.w_ih)
    from_x = write.columns("input", write.plus("biased", gates, bias), 3)
    from_h = recurrent_part(write, given)
    parts = [None] * 3 if from_h is None else write.columns("hidden", from_h, 3)
    reset, update = (write.apply(f"open{k}", SIGMOID, write.plus(f"gate{k}", from_x[k], parts[k])) for k in (0, 1))
    inner = new_bias if parts[2] is None else write.plus("inner", parts[2], new_bias)
    inner = None if inner is None else write.multiply("reset", reset, inner)
    new = write.apply("new", TANH, write.plus("before", from_x[2], inner))
    rest = write.emit("rest", SUB, write.shape(new), hidden, new)
    return write.add("state", new, write.multiply("kept", update, rest))


@rewrites("aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def rnn_cell(make: Canonicaliser, node: Node) -> Ref:
    """h ← f(W_ih·x + W_hh·h + b)."""
    given = arguments_as(RecurrentCell, node)
    write = NodeWriter(make, node.name, make.nodes[given.input.name])
    return write.apply("state", TANH if "tanh" in node.op else RELU, pre_activation(write, given))


def pre_activation(write: NodeWriter, given: RecurrentCell) -> Ref:
    """W_ih·x + b + W_hh·h."""
    bias = both_biases(write, given.parameters)
    gates = write.linear("gates", given.input, given.w_ih)
    gates = write.plus("biased", gates, bias)
    return write.plus("total", gates, recurrent_part(write, given))


def recurrent_part(write: NodeWriter, given: RecurrentCell) -> Ref | None:
    """W_hh·h; None where the state is zero, as in a first call."""
    hidden = as_list(given.hx)[0]
    from_zero = is_zeros(write.make, hidden)
    return None if from_zero else write.linear("recurrent", hidden, given.w_hh)
