"""What a tracer recorded, and the Graph that is made of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from deadweight.errors import DeadweightError
from deadweight.graph.node import Argument, Graph, Node, Ref, Target, Value
from deadweight.graph.origin import origin_of
from deadweight.source.module_copies import address
from deadweight.source.private_api import OpOverload

IGNORED = {"aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size"}
IGNORED |= {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}
RETURNED = {OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION}  # the caller sees what is written to its tensors


class TraceError(DeadweightError):
    """The model could not be traced; the message is the reason."""


@dataclass(frozen=True)
class Program:
    """A list of operations, and what its placeholders are."""

    graph: torch.fx.Graph
    root: nn.Module  # holds the constants that get_attr names
    parameters: dict[str, str]  # placeholder to state-dict name
    constants: dict[str, Value]  # placeholder to value: buffers and other tensors
    buffers: dict[str, str]  # placeholder to state-dict name, of stored buffers
    inputs: tuple[str, ...]  # placeholders of input tensors
    outputs: tuple[str, ...]  # names of the operations whose values are returned
    specialised: tuple[str, ...] = ()  # notes, where Python code read values


def of_export(module: nn.Module, program: ExportedProgram) -> Program:
    """The program of torch.export, by its signature."""
    parameters, constants, buffers = dict[str, str](), dict[str, Value](), dict[str, str]()
    inputs: list[str] = []
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            parameters[name] = target
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            stored = program.constants.get(target)
            constants[name] = module.get_buffer(target) if stored is None else stored
            if spec.kind == InputKind.BUFFER and spec.persistent:
                buffers[name] = target
        elif spec.kind == InputKind.USER_INPUT and isinstance(values[name], Tensor):
            inputs.append(name)
    outputs = returned_names(module, program)
    return Program(program.graph, program.graph_module, parameters, constants, buffers, tuple(inputs), outputs)


def returned_names(module: nn.Module, program: ExportedProgram) -> tuple[str, ...]:
    """What is returned, what is written to inputs, and, in eval mode, what is written to buffers for the next call."""
    kinds = RETURNED if module.training else RETURNED | {OutputKind.BUFFER_MUTATION}
    specs = sorted(program.graph_signature.output_specs, key=lambda spec: spec.kind != OutputKind.USER_OUTPUT)
    names = (spec.arg.name for spec in specs if spec.kind in kinds and hasattr(spec.arg, "name"))
    return tuple(dict.fromkeys(names))


class GraphBuilder:
    """Turns a Program into a Graph."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        self.module = module
        self.program = program
        self.nodes: dict[str, Node] = {}
        self.parameters: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.tied = tied_names(module)
        self.memory = {address(p): n for n, p in module.named_parameters() if address(p) is not None}

    def build(self) -> Graph:
        for fx_node in self.program.graph.nodes:
            if fx_node.op == "placeholder":
                self.placeholder(fx_node)
            elif fx_node.op == "call_function":
                self.call(fx_node)
            elif fx_node.op == "get_attr":
                self.constant(fx_node.name, operator.attrgetter(fx_node.target)(self.program.root))
        named = [self.aliases.get(name, name) for name in self.program.outputs]
        outputs = tuple(dict.fromkeys(name for name in named if name in self.nodes))
        read = {name for node in self.nodes.values() for name in node.inputs}
        return Graph(
            self.nodes,
            self.parameters,
            outputs,
            self.tensors,
            self.program.inputs,
            self.tied,
            self.unread_parameters(read | set(outputs)),
            training=self.module.training,
            buffers=self.program.buffers,
            specialised=self.program.specialised,
        )

    def placeholder(self, fx_node: torch.fx.Node) -> None:
        name = fx_node.name
        if name in self.program.parameters:
            self.parameter(fx_node, self.program.parameters[name])
        elif name in self.program.constants:
            self.constant(name, self.program.constants[name])
        elif name in self.program.inputs:
            self.add(fx_node, "input")

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

    def read_aside(self, name: str, value: Tensor) -> bool:
        """Whether a constant is a parameter that forward reads through another attribute; it becomes an alias then."""
        parameter = self.memory.get(address(value))
        if parameter is None:
            return False
        own = self.module.get_parameter(parameter)
        if (value.shape, value.stride(), value.dtype) != (own.shape, own.stride(), own.dtype):
            raise TraceError(f"forward reads a view of {parameter} stored as a constant; expected the parameter itself")
        known = next((node for node, named in self.parameters.items() if named == parameter), None)
        if known is None:
            raise TraceError(f"forward reads {parameter} as a constant before it reads it as a parameter")
        self.aliases[name] = known
        return True

    def constant(self, name: str, value: Value) -> None:
        if not isinstance(value, Tensor):
            raise TraceError(f"{name} is a {type(value).__name__}: higher-order operations are not supported")
        if self.read_aside(name, value):
            return
        self.nodes[name] = Node(name, "buffer", shape=tuple(value.shape), dtype=value.dtype)
        self.tensors[name] = value

    def call(self, fx_node: torch.fx.Node) -> None:
        op = op_name(fx_node.target)
        if op not in IGNORED:
            assert not isinstance(fx_node.target, str), fx_node
            self.add(fx_node, op, fx_node.target)

    def add(self, fx_node: torch.fx.Node, op: str, target: Target | None = None) -> None:
        value = fx_node.meta.get("val")
        shape = tuple(int(n) for n in value.shape) if isinstance(value, Tensor) else ()
        dtype = value.dtype if isinstance(value, Tensor) else None
        args = tuple(self.convert(a) for a in fx_node.args)
        kwargs = {k: self.convert(v) for k, v in fx_node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
        origin = origin_of(fx_node.meta)
        self.nodes[fx_node.name] = Node(fx_node.name, op, target, args, kwargs, shape, dtype, origin)

    def convert(self, value: Argument) -> Argument:
        if isinstance(value, torch.fx.Node):
            return Ref(self.aliases.get(value.name, value.name)) if self.known(value.name) else None
        if isinstance(value, (tuple, list)):
            return [self.convert(v) for v in value]
        return value

    def known(self, name: str) -> bool:
        return self.aliases.get(name, name) in self.nodes

    def unread_parameters(self, read: set[str]) -> tuple[str, ...]:
        used = {name for node, name in self.parameters.items() if node in read}
        return tuple(n for n, p in self.module.named_parameters() if n not in used)


def op_name(target: object) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload):
        return str(target).rsplit(".", 1)[0]
    return str(getattr(target, "__name__", target))


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter stored under several names: its first name, and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: tuple(aliases[1:]) for aliases in names.values() if len(aliases) > 1}
