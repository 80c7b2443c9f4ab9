"""Recurrent layers as linear maps, biases, and one operation that runs over time.

Per layer and direction: the input projection of the whole sequence is a `linear`, the two biases that meet before a
gate are one `add` of parameters, and `recurrent.lstm`, `recurrent.gru`, `recurrent.rnn_tanh` or `recurrent.rnn_relu`
does what is left: the recurrence. The number of nodes does not grow with the length of the sequence. A single cell is
spelled out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deadweight.graph.node import Argument, Node, Ref, Target
from deadweight.graph.recurrences import PACKING, RECURRENT
from deadweight.graph.rewriting import Canonicaliser, by_name, rewrites

aten = torch.ops.aten
ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer in one direction; `projection` is W_hr."""

    input: Ref
    hidden: Ref
    input_bias: Ref | None = None
    hidden_bias: Ref | None = None
    projection: Ref | None = None


@dataclass
class Writer:
    """Writes nodes that belong to one recurrent operation; `like` lends its dtype."""

    make: Canonicaliser
    prefix: str
    like: Node

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.make.shape(ref)

    def emit(self, name: str, op: str, target: Target, shape: Sequence[int], *args: Argument) -> Ref:
        return self.make.emit(f"{self.prefix}_{name}", op, target, args, tuple(shape), self.like)

    def once(self, name: str, op: str, target: Target, shape: Sequence[int], *args: Argument) -> Ref:
        """A value made of parameters alone: written once, however often the layer is called."""
        if name not in self.make.nodes:
            self.make.emit(name, op, target, args, tuple(shape), self.like)
        return Ref(name)

    def linear(self, name: str, x: Ref, weight: Ref) -> Ref:
        shape = (*self.shape(x)[:-1], self.shape(weight)[0])
        return self.emit(name, "linear", aten.linear.default, shape, x, weight)

    def add(self, name: str, a: Ref, b: Ref) -> Ref:
        return self.emit(name, "aten.add", aten.add.Tensor, self.shape(a), a, b)

    def plus(self, name: str, a: Ref, b: Ref | None) -> Ref:
        return a if b is None else self.add(name, a, b)

    def multiply(self, name: str, a: Ref, b: Ref) -> Ref:
        return self.emit(name, "aten.mul", aten.mul.Tensor, self.shape(a), a, b)

    def apply(self, name: str, function: str, x: Ref) -> Ref:
        return self.emit(name, f"aten.{function}", getattr(aten, function).default, self.shape(x), x)

    def columns(self, name: str, x: Ref, count: int) -> list[Ref]:
        """Equal parts of the last axis."""
        shape = self.shape(x)
        size = shape[-1] // count
        slices = [(k * size, (k + 1) * size) for k in range(count)]
        target = aten.slice.Tensor
        return [self.emit(f"{name}{a}", "aten.slice", target, (*shape[:-1], size), x, -1, a, b) for a, b in slices]

    def join(self, name: str, parts: list[Ref]) -> Ref:
        """Side by side along the last axis."""
        shape = self.shape(parts[0])
        width = sum(self.shape(part)[-1] for part in parts)
        return parts[0] if len(parts) == 1 else self.emit(name, "aten.cat", CAT, (*shape[:-1], width), parts, -1)

    def sum_once(self, a: Ref, b: Ref) -> Ref:
        return self.once(f"{a.name}_plus_{b.name}", "aten.add", aten.add.Tensor, self.shape(a), a, b)

    def slice_once(self, vector: Ref, start: int, stop: int) -> Ref:
        args = (vector, 0, start, stop)
        return self.once(f"{vector.name}_{start}_{stop}", "aten.slice", aten.slice.Tensor, (stop - start,), *args)


CAT = aten.cat.default


def both_biases(write: Writer, weights: Weights) -> Ref | None:
    """LSTM and plain RNN: both biases are added before the same function."""
    if weights.input_bias is None or weights.hidden_bias is None:
        return weights.input_bias or weights.hidden_bias
    return write.sum_once(weights.input_bias, weights.hidden_bias)


def gru_biases(write: Writer, weights: Weights) -> tuple[Ref | None, Ref | None]:
    """What is added to the gates, and b_hn: of the new gate the reset gate multiplies only the hidden part."""
    x, h = weights.input_bias, weights.hidden_bias
    if x is None or h is None:
        return None, None
    width = write.shape(h)[0]
    gates = 2 * width // 3
    both = write.sum_once(write.slice_once(x, 0, gates), write.slice_once(h, 0, gates))
    parts = [both, write.slice_once(x, gates, width)]
    bias = write.once(f"{x.name}_with_{h.name}", "aten.cat", CAT, (width,), parts, 0)
    return bias, write.slice_once(h, gates, width)


@rewrites("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def split_recurrent(make: Canonicaliser, node: Node) -> tuple[Ref, ...]:
    """Layer by layer: both directions read the same sequence, and their outputs are joined."""
    given = by_name(node)
    x = given["input"] if "input" in given else given["data"]
    states = given["hx"] if isinstance(given["hx"], list) else [given["hx"]]
    directions = 2 if given["bidirectional"] else 1
    layers = list(weights_of(given["params"], given["num_layers"] * directions, given["has_biases"]))
    last: list[tuple[Ref, ...]] = []
    for number, weights in enumerate(layers):
        layer, reverse = divmod(number, directions)
        write = Writer(make, f"{node.name}_l{layer}{'_reverse' * reverse}", make.nodes[x.name])
        start = [initial(write, state, number) for state in states]
        time = (1 if given.get("batch_first") else 0, bool(reverse), given.get("batch_sizes"))
        outputs, *final = one_direction(write, node.op, x, weights, start, time)
        last.append((outputs, *final))
        if reverse == directions - 1:
            x = write.join("both", [found[0] for found in last[-directions:]])
            x = dropped(write, x, given) if layer < given["num_layers"] - 1 else x
    return x, *(stacked(write, f"last{k}", [found[k + 1] for found in last]) for k in range(len(states)))


def weights_of(parameters: list[Ref], count: int, has_biases: bool) -> list[Weights]:
    each = len(parameters) // count
    result = []
    for k in range(0, len(parameters), each):
        own = parameters[k : k + each]
        biases = (own[2], own[3]) if has_biases else (None, None)
        result.append(Weights(own[0], own[1], biases[0], biases[1], own[-1] if each % 2 else None))
    return result


def initial(write: Writer, states: Ref, number: int) -> Ref:
    """The initial state of one layer and direction."""
    shape = write.shape(states)[1:]
    if write.make.nodes[states.name].op in ZEROS:
        return zeros(write, shape)
    name = f"start_{states.name}"
    return write.emit(name, "aten.select", aten.select.int, shape, states, 0, number)


def zeros(write: Writer, shape: tuple[int, ...]) -> Ref:
    return write.emit(f"zeros{'x'.join(map(str, shape))}", "aten.zeros", aten.zeros.default, shape, list(shape))


def dropped(write: Writer, x: Ref, given: dict[str, Argument]) -> Ref:
    """Dropout between layers, in training."""
    if not (given["train"] and given["dropout"]):
        return x
    return write.emit("dropout", "aten.dropout", aten.dropout.default, write.shape(x), x, given["dropout"], True)


def stacked(write: Writer, name: str, parts: list[Ref]) -> Ref:
    shape = (len(parts), *write.shape(parts[0]))
    return write.emit(name, "aten.stack", aten.stack.default, shape, parts, 0)


Time = tuple[int, bool, Ref | None]  # the axis of time, whether it runs backwards, the sizes of packed steps


def one_direction(write: Writer, op: str, x: Ref, weights: Weights, start: list[Ref], time: Time) -> list[Ref]:
    """The sequence of hidden states, and the last state."""
    gates = write.linear("gates", x, weights.input)
    if op == "aten.gru":
        bias, new = gru_biases(write, weights)
        gates = write.plus("biased", gates, bias)
        return run_over(write, "recurrent.gru", gates, start, [*start, weights.hidden, new, *time])
    bias = both_biases(write, weights)
    gates = write.plus("biased", gates, bias)
    if weights.projection is not None:
        return projected(write, gates, weights, weights.projection, start, time)
    tail = [None, *time] if op == "aten.lstm" else [*time]
    return run_over(write, op.replace("aten", "recurrent"), gates, start, [*start, weights.hidden, *tail])


def run_over(write: Writer, op: str, gates: Ref, start: list[Ref], args: list[Argument]) -> list[Ref]:
    """One operation for all steps, and its results by number."""
    name = f"{write.prefix}_steps"
    write.make.nodes[name] = Node(name, op, RECURRENT[op], (gates, *args))
    shapes = [(*write.shape(gates)[:-1], write.shape(start[0])[-1]), *(write.shape(state) for state in start)]
    return [
        write.emit(f"result{k}", "getitem", operator.getitem, shape, Ref(name), k) for k, shape in enumerate(shapes)
    ]


def projected(write: Writer, gates: Ref, weights: Weights, projection: Ref, start: list[Ref], time: Time) -> list[Ref]:
    """With W_hr the recurrence runs on the vectors that it projects: W_hh·h = (W_hh·W_hr)·m, and h = W_hr·m.

    So W_hr writes a space that W_hh and whatever comes behind read, each as an ordinary linear map. A given initial
    state has no m: W_hh reads it by itself, for the first step.
    """
    hidden, cell = start
    small, wide = write.shape(projection)
    columns = write.once(f"{projection.name}_t", "aten.t", aten.t.default, (wide, small), projection)
    rows = write.shape(weights.hidden)[0]
    product = write.linear("product", columns, weights.hidden)
    weight = write.emit("weight", "aten.t", aten.t.default, (rows, wide), product)
    given = write.make.nodes[hidden.name].op not in ZEROS
    first = write.linear("first", hidden, weights.hidden) if given else None
    none = zeros(write, write.shape(cell))
    args = [none, cell, weight, first, *time]
    outputs, last, last_cell = run_over(write, "recurrent.lstm", gates, [none, cell], args)
    return [write.linear("projected", outputs, projection), write.linear("last", last, projection), last_cell]


@rewrites("aten._pack_padded_sequence", "aten._pad_packed_sequence")
def plain_packing(make: Canonicaliser, node: Node) -> Ref:
    """The same by operations that can be differentiated forwards too."""
    op = "recurrent.pack" if "pack_padded" in node.op else "recurrent.pad"
    name = f"{node.name}_plain"
    make.nodes[name] = Node(name, op, PACKING[op], tuple(by_name(node).values()))
    return Ref(name)


@rewrites("aten.lstm_cell")
def lstm_cell(make: Canonicaliser, node: Node) -> tuple[Ref, ...]:
    """c ← σ(f)·c + σ(i)·tanh(g), h ← σ(o)·tanh(c)."""
    x, (hidden, cell), weights = cell_arguments(node)
    write = Writer(make, node.name, make.nodes[x.name])
    gates = write.columns("gate", before_gates(write, x, hidden, weights, both_biases(write, weights)), 4)
    enter, forget, leave = (write.apply(f"open{k}", "sigmoid", gates[k]) for k in (0, 1, 3))
    new = write.apply("new", "tanh", gates[2])
    kept, entered = write.multiply("kept", forget, cell), write.multiply("entered", enter, new)
    after = write.add("cell", kept, entered)
    return write.multiply("hidden", leave, write.apply("seen", "tanh", after)), after


@rewrites("aten.gru_cell")
def gru_cell(make: Canonicaliser, node: Node) -> Ref:
    """h ← n + z·(h − n), n = tanh(x_n + r·(W_hn·h + b_hn))."""
    x, (hidden,), weights = cell_arguments(node)
    write = Writer(make, node.name, make.nodes[x.name])
    bias, new_bias = gru_biases(write, weights)
    gates = write.linear("gates", x, weights.input)
    from_x = write.columns("input", write.plus("biased", gates, bias), 3)
    from_h = recurrent_part(write, hidden, weights)
    parts = [None] * 3 if from_h is None else write.columns("hidden", from_h, 3)
    reset, update = (write.apply(f"open{k}", "sigmoid", write.plus(f"gate{k}", from_x[k], parts[k])) for k in (0, 1))
    inner = new_bias if parts[2] is None else write.plus("inner", parts[2], new_bias)
    inner = None if inner is None else write.multiply("reset", reset, inner)
    new = write.apply("new", "tanh", write.plus("before", from_x[2], inner))
    rest = write.emit("rest", "aten.sub", aten.sub.Tensor, write.shape(new), hidden, new)
    return write.add("state", new, write.multiply("kept", update, rest))


@rewrites("aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def rnn_cell(make: Canonicaliser, node: Node) -> Ref:
    """h ← f(W_ih·x + W_hh·h + b)."""
    x, (hidden,), weights = cell_arguments(node)
    write = Writer(make, node.name, make.nodes[x.name])
    total = before_gates(write, x, hidden, weights, both_biases(write, weights))
    return write.apply("state", "tanh" if "tanh" in node.op else "relu", total)


def cell_arguments(node: Node) -> tuple[Ref, list[Ref], Weights]:
    given = by_name(node)
    states = given["hx"] if isinstance(given["hx"], list) else [given["hx"]]
    return given["input"], states, Weights(given["w_ih"], given["w_hh"], given.get("b_ih"), given.get("b_hh"))


def before_gates(write: Writer, x: Ref, hidden: Ref, weights: Weights, bias: Ref | None) -> Ref:
    gates = write.linear("gates", x, weights.input)
    gates = write.plus("biased", gates, bias)
    return write.plus("total", gates, recurrent_part(write, hidden, weights))


def recurrent_part(write: Writer, hidden: Ref, weights: Weights) -> Ref | None:
    """W_hh·h; nothing in the first step, from a state of zeros."""
    empty = write.make.nodes[hidden.name].op in ZEROS
    return None if empty else write.linear("recurrent", hidden, weights.hidden)
