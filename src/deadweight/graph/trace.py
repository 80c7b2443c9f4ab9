"""From a module and example inputs to a Graph, by torch.export."""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from deadweight.errors import DeadweightError
from deadweight.graph.attention import decompositions
from deadweight.graph.node import Graph, Node, Ref
from deadweight.silence import silenced

IGNORED = {"aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size"}


class TraceError(DeadweightError):
    """torch.export could not follow the model; the message is the reason."""


def trace(module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Graph:
    """The module's computation on these inputs as a Graph; raises TraceError with torch.export's reason."""
    program = export(module, args, dict(kwargs or {}))
    try:
        return GraphBuilder(module, program).build()
    except (RuntimeError, TypeError, ValueError) as error:  # shapes that depend on the data
        raise error if isinstance(error, TraceError) else TraceError(first_line(error)) from error


def export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    try:
        with quiet():
            program = torch.export.export(module, args, kwargs, strict=False)
            if needs_lowering(program):
                program = program.run_decompositions(decompositions())
    except Exception as error:  # torch.export raises every kind of exception: all of them mean "not traced"
        raise TraceError(first_line(error)) from error
    return program


def needs_lowering(program: ExportedProgram) -> bool:
    """Whether the graph still mutates tensors, calls higher-order ops, or holds ops that we spell out."""
    table = decompositions()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            return True
        if node.target in table or node.target._schema.is_mutable:
            return True
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export logs and warns about what it cannot guard; the reason reaches the user as TraceError instead."""
    with silenced("torch"), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


class GraphBuilder:
    """Turns an ExportedProgram into a Graph."""

    def __init__(self, module: nn.Module, program: ExportedProgram) -> None:
        self.module = module
        self.program = program
        self.nodes: dict[str, Node] = {}
        self.parameters: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, str] = {}
        self.inputs: list[str] = []
        self.aliases: dict[str, str] = {}
        self.tied = tied_names(module)

    def build(self) -> Graph:
        outputs: tuple[str, ...] = ()
        for fx_node in self.program.graph.nodes:
            if fx_node.op == "output":
                outputs = self.user_outputs(fx_node)
            elif fx_node.op == "placeholder":
                self.placeholder(fx_node)
            elif fx_node.op == "call_function":
                self.call(fx_node)
            elif fx_node.op == "get_attr":
                self.constant(fx_node.name, getattr(self.program.graph_module, fx_node.target))
        read = {name for node in self.nodes.values() for name in node.inputs}
        unused = self.unread_parameters(read | set(outputs))
        return Graph(
            self.nodes,
            self.parameters,
            outputs,
            self.tensors,
            tuple(self.inputs),
            self.tied,
            unused,
            training=self.module.training,
            buffers=self.buffers,
        )

    def placeholder(self, fx_node: torch.fx.Node) -> None:
        spec = next(s for s in self.program.graph_signature.input_specs if s.arg.name == fx_node.name)
        if spec.kind == InputKind.PARAMETER:
            self.parameter(fx_node, str(spec.target))
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            self.constant(fx_node.name, self.stored_tensor(spec))
            if spec.kind == InputKind.BUFFER and spec.persistent:
                self.buffers[fx_node.name] = str(spec.target)
        elif spec.kind == InputKind.USER_INPUT and isinstance(fx_node.meta.get("val"), torch.Tensor):
            self.add(fx_node, "input")
            self.inputs.append(fx_node.name)

    def parameter(self, fx_node: torch.fx.Node, name: str) -> None:
        """A tied parameter becomes one node, under the first of its names."""
        first = next((k for k, others in self.tied.items() if name == k or name in others), name)
        known = next((node for node, parameter in self.parameters.items() if parameter == first), None)
        if known is not None:
            self.aliases[fx_node.name] = known
            return
        self.add(fx_node, "parameter")
        self.parameters[fx_node.name] = first
        self.tensors[fx_node.name] = self.module.get_parameter(first)

    def stored_tensor(self, spec: Any) -> torch.Tensor:
        target = str(spec.target)
        if spec.kind == InputKind.BUFFER and target not in self.program.constants:
            return self.module.get_buffer(target)
        value = self.program.constants[target]
        if not isinstance(value, torch.Tensor):
            raise TraceError(f"constant {target} is a {type(value).__name__}, not a tensor")
        return value

    def constant(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise TraceError(f"{name} is a {type(value).__name__}: higher-order operations are not supported")
        self.nodes[name] = Node(name, "buffer", shape=tuple(value.shape), dtype=value.dtype)
        self.tensors[name] = value

    def call(self, fx_node: torch.fx.Node) -> None:
        op = op_name(fx_node.target)
        if op not in IGNORED:
            self.add(fx_node, op, fx_node.target)

    def add(self, fx_node: torch.fx.Node, op: str, target: Any = None) -> None:
        value = fx_node.meta.get("val")
        shape = tuple(int(n) for n in value.shape) if isinstance(value, torch.Tensor) else ()
        dtype = value.dtype if isinstance(value, torch.Tensor) else None
        args = tuple(self.convert(a) for a in fx_node.args)
        kwargs = {k: self.convert(v) for k, v in fx_node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
        self.nodes[fx_node.name] = Node(fx_node.name, op, target, args, kwargs, shape, dtype)

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Ref(self.aliases.get(value.name, value.name)) if self.known(value.name) else None
        if isinstance(value, (tuple, list)):
            return [self.convert(v) for v in value]
        return value

    def known(self, name: str) -> bool:
        return self.aliases.get(name, name) in self.nodes

    def user_outputs(self, fx_node: torch.fx.Node) -> tuple[str, ...]:
        wanted = [s.arg.name for s in self.program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
        flat = [n.name for n in fx_node.all_input_nodes]
        return tuple(name for name in dict.fromkeys(flat) if name in wanted and name in self.nodes)

    def unread_parameters(self, read: set[str]) -> tuple[str, ...]:
        used = {name for node, name in self.parameters.items() if node in read}
        return tuple(n for n, p in self.module.named_parameters() if n not in used)


def op_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target).rsplit(".", 1)[0]
    return str(getattr(target, "__name__", target))


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter stored under several names: its first name, and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: tuple(found[1:]) for found in names.values() if len(found) > 1}
