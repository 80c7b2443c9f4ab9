"""Tracing with the values of the example, for models whose Python code reads values of tensors.

The graph is that of the path which the example takes. Tensors stay operations of the graph; only numbers that Python
read from them are constants. Every value that was read and that depends on a parameter becomes an output of the graph:
a change of parameters that keeps this output keeps the path. A float that was read is refused, because Python may
compute with it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from linecache import getline
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from deadweight.graph.fused_attention import decompositions
from deadweight.graph.named_tensors import input_names, tensors_in
from deadweight.graph.strides import Description
from deadweight.graph.traced_program import Program, TraceError, op_name
from deadweight.source.private_api import OpOverload, rename_node
from deadweight.source.type_aliases import Arguments, Keywords, Leaf, Options

TORCH = str(Path(torch.__file__).parent)
LAYERS = str(Path(torch.nn.__file__).parent)
OURS = str(Path(__file__).parent)
NUMBERS = {"aten.item", "aten._local_scalar_dense"}  # they return a Python number
DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
MOST_PLACES = 4  # in a note
VALUE, STACK = "val", "stack_trace"  # torch's keys of a node's meta: the value of the example, and the lines of code
LINE = "line"  # our own: the innermost line


@dataclass(frozen=True)
class ValueRead:
    """A place where Python code reads values of tensors, and what these values depend on."""

    place: str  # file:line: the line
    operands: tuple[str, ...]  # the nodes whose values are read
    parameters: bool  # whether they depend on parameters
    inputs: tuple[str, ...]  # the inputs that they depend on
    number: torch.dtype | None  # the dtype of a number that was read; None where only a shape or a branch depends on it

    def __str__(self) -> str:
        return f"{' and '.join(self.inputs + ('parameters',) * self.parameters)} at {self.place}"


def trace_on_values(module: nn.Module, args: Arguments, kwargs: Mapping[str, Leaf]) -> Program:
    """The operations that the module runs on these inputs. The module is run: pass a copy if it must not change."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    stored = {**parameters, **buffers}
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    names = input_names(module, args, kwargs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    n_returned = 0

    def run(tensors: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        nonlocal n_returned
        note_lines()
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        call = pytree.tree_unflatten(filled, spec)
        with WithoutIdleDropout():
            result = torch.func.functional_call(module, dict(zip(stored, tensors, strict=True)), *call)
        returned = list(tensors_in(result))
        n_returned = len(returned)
        return [*returned, *given, *([] if module.training else tensors[len(parameters) :])]

    recorded = record(run, [t.detach() for t in stored.values()], [leaves[i].detach() for i in places])
    holders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    rename(holders, [*map(stored_name, stored), *(names[i] for i in places)])
    reads = value_reads(recorded, holders[: len(parameters)], holders[len(stored) :])
    refuse_floats(reads)
    kept = dict(zip((node.name for node in holders), stored, strict=False))
    return Program(
        graph=recorded.graph,
        root=recorded,
        parameters={node: name for node, name in kept.items() if name in parameters},
        constants={node: buffers[name] for node, name in kept.items() if name in buffers},
        buffers={node: name for node, name in kept.items() if name in persistent(module)},
        inputs=tuple(node.name for node in holders[len(stored) :]),
        outputs=(
            *returned_and_written(recorded, n_returned),
            *(name for read in reads if read.parameters for name in read.operands),
        ),
        specialised=(note(list(dict.fromkeys(map(str, reads)))),) if reads else (),
    )


def record(run: Callable[..., Leaf], *tensors: list[Tensor]) -> torch.fx.GraphModule:
    """The operations as torch.export would record them: composite ones not decomposed, without mutations."""
    functional = dispatch_functionalize(run, FunctionalTensorMode(pre_dispatch=True, export=True))
    options: Options = {"tracing_mode": "real", "pre_dispatch": True, "_error_on_data_dependent_ops": False}
    return make_fx(functional, decomposition_table=decompositions(), **options)(*tensors)


class WithoutIdleDropout(TorchFunctionMode):
    """Dropout that is off returns its input itself, as in eager mode: writing to the result writes to the input.

    A 0-dimensional tensor in an f-string (the name of an expert) is formatted as a number, as in eager mode, and
    recorded as a value that was read.
    """

    def __torch_function__(
        self, func: Callable[..., Leaf], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        kwargs = kwargs or {}
        if func is Tensor.__format__ and args[0].dim() == 0:
            return format(args[0].item(), *args[1:])
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        if getattr(func, "__name__", "") in DROPOUTS and not training:
            return args[0]
        return func(*args, **kwargs)


def note_lines() -> None:
    """Make the running tracer note for every operation the line of code that it comes from."""
    mode = get_proxy_mode()
    assert mode is not None
    create = mode.tracer.create_node

    def create_node(*args: Leaf, **kwargs: Leaf) -> torch.fx.Node:
        node = create(*args, **kwargs)
        node.meta[LINE] = calling_line()
        node.meta.setdefault(STACK, calling_stack())
        return node

    mode.tracer.create_node = create_node  # type: ignore[method-assign]


def calling_line() -> str:
    """file:line: text, of the innermost code that is not the tracer's: the user's, a library's, or torch.nn's."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if (not file.startswith((TORCH, OURS, "<")) or file.startswith(LAYERS)) and "contextlib" not in file:
            return f"{short_path(file)}:{frame.f_lineno}: {getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back
    return "an unknown line"


def calling_stack() -> str:
    """The lines of the model that are running, the innermost last, as torch.export writes them."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("run", __file__):
        frames.append(f'File "{frame.f_code.co_filename}", line {frame.f_lineno}')
        frame = frame.f_back
    return "\n".join(reversed(frames))


def short_path(file: str) -> str:
    """The path relative to the folder of packages or to the working directory."""
    path = Path(file)
    roots = [
        root
        for root in (*map(Path, sys.path[1:]), Path.cwd())
        if root.is_absolute() and path.is_relative_to(root) and root != Path(root.anchor)
    ]
    if roots:  # the innermost: an environment may lie inside the working directory
        return str(path.relative_to(max(roots, key=lambda root: len(root.parts))))
    return str(Path(*path.parts[-3:]))


def rename(nodes: list[torch.fx.Node], names: list[str]) -> None:
    for node, name in zip(nodes, names, strict=True):
        rename_node(node, name)


def stored_name(name: str) -> str:
    return f"p_{name.replace('.', '_')}"


def persistent(module: nn.Module) -> set[str]:
    return set(module.state_dict(keep_vars=True))


def returned_and_written(recorded: torch.fx.GraphModule, n_returned: int) -> list[str]:
    """What is returned, and the new values of inputs and buffers that were written to."""
    (values,) = recorded.graph.output_node().args
    assert isinstance(values, (list, tuple))
    returned, after = values[:n_returned], values[n_returned:]
    nodes = [*returned, *(value for value in after if getattr(value, "op", "") == "call_function")]
    return list(dict.fromkeys(node.name for node in nodes if isinstance(node, torch.fx.Node)))


Origins = dict[torch.fx.Node, tuple[bool, tuple[str, ...]]]  # whether it depends on parameters, and on which inputs


def value_reads(
    recorded: torch.fx.GraphModule, parameters: list[torch.fx.Node], inputs: list[torch.fx.Node]
) -> list[ValueRead]:
    """Every operation that reads values which depend on parameters or inputs."""
    origins: Origins = dict.fromkeys(parameters, (True, ())) | {node: (False, (node.name,)) for node in inputs}
    reads: list[ValueRead] = []
    for node in recorded.graph.nodes:
        sources = [origins[n] for n in node.all_input_nodes if n in origins]
        names = tuple(dict.fromkeys(name for _, names in sources for name in names))
        origins.setdefault(node, (any(p for p, _ in sources), names))
        if sources and node.op == "call_function" and reads_values(recorded, node):
            reads.append(value_read(node, origins))
    return [read for read in reads if read.parameters or read.inputs]


def reads_values(recorded: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether the shape of the result, or a number that is returned, depends on values: fake tensors show it."""
    if not isinstance(node.target, OpOverload):
        return False

    def described(operand: torch.fx.Node) -> Leaf:
        return Description(value_of(recorded, operand))

    shadows = torch.fx.node.map_arg((node.args, node.kwargs), described)
    with FakeTensorMode():
        args, kwargs = pytree.tree_map_only(Description, Description.tensor, shadows)
        try:
            node.target(*args, **kwargs)
        except Exception:  # noqa: BLE001 - torch raises many kinds of exception for it
            return True
    return False


def value_of(recorded: torch.fx.GraphModule, node: torch.fx.Node) -> Tensor:
    return getattr(recorded, str(node.target)) if node.op == "get_attr" else node.meta[VALUE]


def value_read(node: torch.fx.Node, origins: Origins) -> ValueRead:
    """The values that an operation reads: if a shape depends on them, masks and indices alone, where there are any."""
    values = {n: value for n in node.all_input_nodes if isinstance(value := n.meta.get(VALUE), Tensor)}
    number = next(iter(values.values())).dtype if op_name(node.target) in NUMBERS else None
    discrete = [n for n, value in values.items() if not value.is_floating_point() and not value.is_complex()]
    by_shape = isinstance(node.meta.get(VALUE), (Tensor, list, tuple))
    operands = discrete if by_shape and discrete else list(values)
    known = [origins[n] for n in operands]
    inputs = tuple(dict.fromkeys(name for _, names in known for name in names))
    names = tuple(n.name for n in operands)
    return ValueRead(node.meta.get(LINE, "an unknown line"), names, any(p for p, _ in known), inputs, number)


def refuse_floats(reads: list[ValueRead]) -> None:
    """Raise if Python reads a float that depends on parameters or inputs: what it computes with it is not traced."""
    for read in reads:
        if read.number is not None and (read.number.is_floating_point or read.number.is_complex):
            raise TraceError(
                f"Python reads a {str(read.number).removeprefix('torch.')} number from a tensor that depends on {read};"
                " expected tensors there: arithmetic on Python numbers is not traced"
            )


def note(places: list[str]) -> str:
    """What a reader of the findings must know."""
    more = len(places) - MOST_PLACES
    shown = "; ".join(places[:MOST_PLACES]) + (f"; and {more} more places" if more > 0 else "")
    path = "traced with the values of the example inputs: findings hold for inputs that take the same path"
    return f"{path}; Python reads values of {shown}"
