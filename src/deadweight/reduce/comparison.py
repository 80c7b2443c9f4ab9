"""Running two models on the same inputs and measuring the difference: in float64, and in the model's own precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, first_line, trace
from deadweight.reduce.error_limits import Error, Noise, Verification, noise_floor
from deadweight.reduce.rounding_noise import add_rounding
from deadweight.source.examples import left_out, with_all_signals
from deadweight.source.inputs import Inputs
from deadweight.source.model import Source
from deadweight.source.printable import printable
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

DRAWS = 6  # inputs; four times as many where an output is small, because its noise varies more
FEW = 100  # elements: an output with fewer is small
MANY = 10_000  # elements: from here on two inputs show the noise as well as six
WORK = 1 << 27  # numbers that a model may compute for all inputs together, where two inputs are enough
LENGTH = 24  # tokens
Read = Callable[[str], Tensor]
Call = tuple[Arguments, Keywords]


@dataclass(frozen=True)
class ComparedModel:
    """A model with its weights, its graph, and the inputs on which it is compared."""

    source: Source
    graph: Graph
    calls: tuple[Call, ...]
    words: str  # a description of the inputs
    suffix: str = ""  # of the names of its outputs

    @property
    def module(self) -> nn.Module:
        return self.source.module


def prepare_comparison(source: Source, text: Sequence[Tensor] = ()) -> ComparedModel:
    """Trace a model that has its weights, and draw inputs for it; `text` is token ids to run it on too."""
    graph = canonical(trace(source.module, source.args, source.kwargs), pieces=False)
    draws = inputs_to_draw(graph)
    calls = [source.draw(torch.Generator().manual_seed(seed)) for seed in range(draws)]
    words = f"{draws} random inputs"
    ids = source.kwargs.get("input_ids")
    if ids is not None and ids.ndim == 2:
        span = source.inputs.spans.get("input_ids")
        for tokens in text:
            valid = span is None or int(tokens.max()) <= span.high  # the tokenizer may be that of another model
            if valid and tokens.shape[-1] >= ids.shape[-1]:
                calls.append(((), {**source.inputs.kwargs, "input_ids": tokens[:, : ids.shape[-1]]}))
                words = f"{draws} random inputs and {len(calls) - draws} pieces of text"
    absent = left_out(source.module, source.inputs) if source.config is not None else ()
    words += f" without {' or '.join(absent)}" if absent else ""
    return ComparedModel(source, graph, tuple(calls), words)


def prepare_with_signals(one: ComparedModel, length: int | None = None) -> ComparedModel | None:
    """The same model on inputs that have the images or the sound that its example leaves out; None if it has all.

    What is proved without an image need not hold with one: an image may be written into the same stream.
    """
    source = one.source
    if source.config is None:
        return None
    inputs = with_all_signals(source.module, source.config, source.inputs, length)
    if inputs is None:
        return None
    parameter = next(source.module.parameters())
    args, kwargs = inputs.on(parameter.device, parameter.dtype)
    with suppress(TraceError):
        whole = prepare_comparison(replace(source, inputs=inputs, args=args, kwargs=kwargs))
        if not whole.graph.specialised:
            more = " and ".join(left_out(source.module, source.inputs))
            return replace(whole, words=f"{len(whole.calls)} with {more}", suffix=f" with {more}")
    return None


def inputs_to_draw(graph: Graph) -> int:
    """How many inputs are needed to measure a model's noise; two for a slow model with large outputs."""
    smallest = min((math.prod(n.shape) for n in map(graph.node, graph.outputs) if n.is_float), default=0)
    if smallest < MANY:
        return DRAWS if smallest >= FEW else 4 * DRAWS
    work = sum(math.prod(n.shape) for n in graph.nodes.values() if n.op not in ("parameter", "buffer"))
    return min(DRAWS, max(2, WORK // max(work, 1)))


def in_float64(one: ComparedModel, read: Read | None = None, *, rounding: bool = False) -> list[list[Tensor]]:
    """The outputs for every input, all arithmetic in float64; `read` replaces the model's own weights.

    With `rounding`, the rounding of the model's own precision is simulated, the same on every machine.
    """
    values = {n: t.detach() for n, t in one.graph.tensors.items()}
    if read is not None:
        for node, name in (*one.graph.parameters.items(), *one.graph.buffers.items()):
            values[node] = read(name)
    result = []
    with torch.no_grad():
        for number, (args, kwargs) in enumerate(one.calls):
            watch = partial(add_rounding, number=number) if rounding else None
            outputs = evaluate(one.graph, values, bind(one.graph, args, kwargs), watch)
            result.append([o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()])
    return result


def outputs_of_original(one: ComparedModel, read: Read | None = None) -> list[list[Tensor]]:
    """`in_float64` of the model with which others are compared; raises if it returns NaN, which equals nothing."""
    try:
        truth = in_float64(one, read)
    except IndexError as error:
        raise DeadweightError(
            f"{printable(one.source.name)} does not run on random tokens: one of its tables has fewer rows than its "
            "config says; expected the number of rows as vocab_size in config.json"
        ) from error
    if any(bool(x.isnan().any()) for outputs in truth for x in outputs):
        raise DeadweightError(
            f"{printable(one.source.name)} returns NaN; expected numbers to compare with: repair the checkpoint first"
        )
    return truth


def in_own_precision(module: nn.Module, calls: Sequence[Call], inputs: Inputs) -> list[list[Tensor]]:
    """The outputs of the module in its own precision."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    result = []
    with torch.no_grad():
        for args, kwargs in calls:
            here = Inputs(args, kwargs).on(torch.device("cpu"), dtype)
            try:
                output = module(*here[0], **here[1])
            except Exception as error:
                raise DeadweightError(f"the model does not run on its example inputs ({first_line(error)})") from error
            result.append(list(distinct(output)))
    return result


def distinct(output: Leaf) -> Iterator[Tensor]:
    """Every floating-point tensor that the model returns, once."""
    seen: set[int] = set()
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf


def relative(outputs: Sequence[Sequence[Tensor]], truth: Sequence[Sequence[Tensor]]) -> list[float]:
    """Per output: the norm of the difference divided by that of the truth, both over all inputs together."""
    pairs: list[list[tuple[float, float]]] = []
    for a, b in zip(outputs, truth, strict=True):
        if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
            raise DeadweightError(
                f"the outputs differ in shape: {[list(y.shape) for y in b]} and {[list(x.shape) for x in a]}"
            )
        pairs.append([difference(x, y) for x, y in zip(a, b, strict=True)])
    return [ratio(column) for column in zip(*pairs, strict=True)]


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The ratio of sums over all inputs: one input with an output close to zero would dominate a mean of ratios."""
    off, size = (sum(p[i] for p in pairs) for i in (0, 1))
    return (off / max(size, 1e-300)) ** 0.5


def difference(output: Tensor, truth: Tensor) -> tuple[float, float]:
    """The squared norms of the difference and of the truth."""
    output, truth = output.to(torch.float64), truth.to(torch.float64)
    finite = torch.isfinite(truth)
    if not torch.equal(output[~finite], truth[~finite]) or not bool(torch.isfinite(output[finite]).all()):
        return float("inf"), 1.0  # a masked logit is −∞ in both; NaN equals nothing
    return float((output[finite] - truth[finite]).square().sum()), float(truth[finite].square().sum())


def names_of(one: ComparedModel, count: int) -> list[str]:
    """The names that the model gives its outputs, or numbers where it gives none."""
    with torch.no_grad():
        try:
            here = Inputs(*one.calls[0]).on(torch.device("cpu"))
            output = one.module(*here[0], **here[1])
        except Exception:  # noqa: BLE001 - only names are wanted
            output = None
    keys = [k for k, v in output.items() if isinstance(v, Tensor)] if isinstance(output, Mapping) else []
    names = keys if len(keys) == count else [f"output {i}" for i in range(count)]
    return [name + one.suffix for name in names]


def compare(a: ComparedModel, b: ComparedModel) -> Verification:
    """Two models, each with weights and graph of its own, on the inputs of the first."""
    if sorted(b.source.kwargs) != sorted(a.source.kwargs) or len(b.source.args) != len(a.source.args):
        raise DeadweightError(f"the models take different inputs: {takes(a)} and {takes(b)}; expected one architecture")
    if shapes(a) != shapes(b):
        raise DeadweightError(
            f"the models take inputs of different shapes: {shapes(a)} and {shapes(b)}; expected one architecture"
        )
    if returns(a) != returns(b):
        raise DeadweightError(f"the outputs differ in shape: {returns(a)} and {returns(b)}; the functions differ")
    b = replace(b, calls=a.calls)
    truth = outputs_of_original(a)
    try:
        theirs = in_float64(b)
    except IndexError as error:
        raise DeadweightError(
            f"{printable(b.source.name)} cannot run on the inputs of {printable(a.source.name)}: its tables have fewer "
            "rows; expected two models with one vocabulary"
        ) from error
    exact = relative(theirs, truth)
    floor = noise_floor(a.graph, relative(in_own_precision(a.module, a.calls, a.source.inputs), truth))
    own = relative(in_own_precision(b.module, a.calls, a.source.inputs), truth)
    before = noise_floor(a.graph, relative(in_float64(a, rounding=True), truth))
    noise = map(Noise, relative(in_float64(b, rounding=True), truth), before)
    rows = zip(names_of(a, len(exact)), exact, own, floor, noise, strict=True)
    return Verification(tuple(Error(*row, stored=True) for row in rows), a.words)


def shapes(one: ComparedModel) -> list[list[int]]:
    leaves = pytree.tree_leaves((one.source.args, one.source.kwargs))
    return [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]


def returns(one: ComparedModel) -> list[list[int]]:
    return [list(node.shape) for node in map(one.graph.node, one.graph.outputs) if node.is_float]


def takes(one: ComparedModel) -> str:
    return ", ".join(one.source.kwargs) or f"{len(one.source.args)} tensors"
