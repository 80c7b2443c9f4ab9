"""From a module and example inputs to a Graph: by torch.export, or with the values of the example."""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from deadweight.graph.fused_attention import SpelledOut, decompositions
from deadweight.graph.inplace import without_writing
from deadweight.graph.node import Graph
from deadweight.graph.traced_program import GraphBuilder, Program, TraceError, of_export, tied_names
from deadweight.graph.unread_parameters import keep_what_is_read
from deadweight.graph.value_tracing import trace_on_values
from deadweight.silence import silenced
from deadweight.source.inputs import Inputs, refuse_hidden_tensors
from deadweight.source.module_copies import share_tensors
from deadweight.source.private_api import OpOverload, schema
from deadweight.source.remembered_results import forgetting_results
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

__all__ = ["TraceError", "first_line", "tied_names", "trace"]


def trace(module: nn.Module, args: Arguments = (), kwargs: Mapping[str, Leaf] | None = None) -> Graph:
    """The module's computation on these inputs as a Graph; raises TraceError with the reason.

    Where torch.export fails because Python code reads values, the model is traced with those of the example, and
    `specialised` says where values were read. The module does not change, even if its forward stores something in it.
    """
    given = dict(kwargs or {})
    refuse_hidden_tensors(Inputs(args, given))
    with forgetting_results(module):
        return trace_copies(module, args, given)


def trace_copies(module: nn.Module, args: Arguments, given: Keywords) -> Graph:
    """Trace a copy by torch.export, or else another one with the values of the example."""
    try:
        return build_graph(module, export(share_tensors(module), args, given))
    except TraceError as refusal:
        if without_values(module, args, given):
            raise
        try:
            return keep_what_is_read(build_graph(module, on_values(share_tensors(module), args, given)))
        except TraceError as error:
            raise TraceError(f"{error} (torch.export: {refusal})") from error


def build_graph(module: nn.Module, program: Program) -> Graph:
    try:
        graph = GraphBuilder(module, program).build()
        if not graph.outputs:
            raise TraceError("forward returns no tensor; expected at least one")
        return graph
    except (RuntimeError, TypeError, ValueError) as error:  # shapes that depend on the data
        raise error if isinstance(error, TraceError) else TraceError(first_line(error)) from error


def without_values(module: nn.Module, args: Arguments, kwargs: Keywords) -> bool:
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return any(t.is_meta for t in (*tensors, *module.parameters(), *module.buffers()))


def export(module: nn.Module, args: Arguments, kwargs: Keywords) -> Program:
    try:
        with quiet(), plain_layers():
            with SpelledOut():
                program = torch.export.export(module, args, kwargs, strict=False)
            without_writing(program.graph)
            name_outputs(program)
            if needs_lowering(program):
                program = program.run_decompositions(decompositions())
        return of_export(module, program)
    except Exception as error:  # torch.export raises every kind of exception: all of them mean "not traced"
        raise TraceError(first_line(error)) from error


def name_outputs(program: ExportedProgram) -> None:
    """Make the program's signature name the nodes that its graph returns: functional forms replaced some of them."""
    returned = program.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    for spec, value in zip(program.graph_signature.output_specs, returned, strict=True):
        if isinstance(value, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = value.name


def on_values(module: nn.Module, args: Arguments, kwargs: Keywords) -> Program:
    try:
        with quiet(), plain_layers():
            return trace_on_values(module, args, kwargs)
    except Exception as error:  # the model's own code runs
        raise error if isinstance(error, TraceError) else TraceError(first_line(error)) from error


def needs_lowering(program: ExportedProgram) -> bool:
    """Whether the graph still has in-place operations, higher-order operations, or ones that we spell out."""
    table = decompositions()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload):
            return True
        if node.target in table or schema(node.target).is_mutable:
            return True
    return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export logs and warns about what it cannot guard; the reason reaches the user as TraceError instead."""
    with silenced("torch"), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Switch off the fused path of nn.MultiheadAttention and nn.TransformerEncoder: it hides the softmax."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
