"""Tracing and the canonical vocabulary keep the function, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate
from deadweight.graph.trace import TraceError, trace
from deadweight.source.module_copies import copy_tensors

SAME = 1e-12  # relative: a whole tiny model in float64 rounds at about 1e-15


def assert_same_function(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], within: float = SAME
) -> None:
    """Both graphs against the module itself, run in float64."""
    traced = trace(module, args, kwargs)
    wide = copy.deepcopy(module).double()
    floats = lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v  # noqa: E731
    torch.manual_seed(0)
    out = wide(*map(floats, args), **{k: floats(v) for k, v in kwargs.items()})
    expected = out[0] if not isinstance(out, Tensor) else out
    for graph in (traced, canonical(traced)):
        torch.manual_seed(0)
        result = evaluate(graph, graph.tensors, bind(graph, args, kwargs))[0]
        assert result.dtype == torch.float64
        assert float((result - expected).detach().abs().max()) < within * float(expected.detach().abs().max())


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_hugging_face_models_stay_the_same_function(build: Callable, name: str) -> None:
    module, inputs = build(name)
    assert_same_function(module, (), inputs)


@pytest.mark.parametrize("name", ["llama", "t5", "gemma2", "vit"])
def test_models_that_work_in_float32_inside_agree_up_to_that(build: Callable, name: str) -> None:
    """Their norms and rotary angles are float32 whatever is asked: the module is only that exact, the graph is more."""
    module, inputs = build(name)
    assert_same_function(module, (), inputs, within=1e-5)


class Stack(nn.Module):
    """Layers one after another, and a nonlinearity at the end."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


class Dot(nn.Module):
    """The library's fused attention, with its options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.heads = options, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(x).unflatten(-1, (2, 2)).transpose(1, 2)
        k = q[:, :1] if self.options.get("enable_gqa") else q
        return F.scaled_dot_product_attention(q, k, k.sin(), **self.options)


MODULES = {
    "convolution": (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "unbatched convolution": (nn.Conv1d(4, 6, 3), (4, 9)),
    "unbatched square convolution": (nn.Conv1d(4, 7, 3), (4, 9)),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    "transposed convolution": (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9)),
    "batch norm": (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 9)),
    "batch norm of vectors": (nn.BatchNorm1d(6), (4, 6)),
    "group norm": (nn.GroupNorm(2, 6), (2, 6, 5)),
    "instance norm": (nn.InstanceNorm1d(6, affine=True), (2, 6, 5)),
    "tracking instance norm": (nn.InstanceNorm1d(6, track_running_stats=True), (2, 6, 5)),
    "layer norm over two axes": (nn.LayerNorm((6, 5)), (2, 6, 5)),
    "rms norm": (nn.RMSNorm(6, eps=1e-6), (2, 5, 6)),
    "attention": (Dot(), (2, 5, 4)),
    "causal attention": (Dot(is_causal=True), (2, 5, 4)),
    "masked attention": (Dot(attn_mask=torch.ones(5, 5).tril().bool()), (2, 5, 4)),
    "scaled attention": (Dot(scale=0.3), (2, 5, 4)),
    "grouped attention": (Dot(enable_gqa=True), (2, 5, 4)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_layers_stay_the_same_function(name: str, training: bool) -> None:
    layer, shape = MODULES[name]
    torch.manual_seed(0)
    module = Stack(copy.deepcopy(layer)).train(training)
    with torch.no_grad():
        for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    assert_same_function(module, (torch.randn(shape),), {})


def test_evaluation_is_float64_where_the_code_asks_for_float32() -> None:
    class Upcasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0 + 2.0**-20]))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.float32) + self.weight.float() + torch.zeros(1, dtype=torch.float32)).to(torch.bfloat16)

    x = torch.tensor([2.0**-40], dtype=torch.float64)
    graph = canonical(trace(Upcasting(), (x.float(),)))
    (result,) = evaluate(graph, graph.tensors, {graph.inputs[0]: x})
    assert result.dtype == torch.float64 and float(result) == 1.0 + 2.0**-20 + 2.0**-40


def test_tied_parameters_are_one_node(build: Callable) -> None:
    module, inputs = build("gpt2")
    graph = trace(module, (), inputs)
    assert graph.tied == {"transformer.wte.weight": ("lm_head.weight",)}
    assert "lm_head.weight" not in graph.parameters.values()
    readers = {n.op for n in canonical(graph).users[graph.node_of["transformer.wte.weight"]]}
    assert readers == {"aten.embedding", "linear"}


def test_parameters_that_nothing_reads_are_listed() -> None:
    module = Stack(nn.Linear(4, 4))
    module.extra = nn.Linear(2, 2)
    graph = trace(module, (torch.randn(2, 4),))
    assert graph.unused == ("extra.weight", "extra.bias")


class Scaling(nn.Module):
    """Arithmetic in Python, on a number that a branch depends on as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm().item()
        return self.layer(x) * size if size > 1 else self.layer(-x)


def test_a_float_that_python_reads_is_a_trace_error_that_names_the_line() -> None:
    with pytest.raises(TraceError, match=r"Python reads a float32 number.*x at .*test_trace.py:\d+: size = x.norm"):
        trace(Scaling(), (torch.randn(2, 4),))


def test_an_untraced_model_gets_evidence_and_no_findings() -> None:
    result = deadweight.audit(Scaling(), torch.randn(2, 4))
    assert result.untraced is not None and "data-dependent" in result.untraced
    assert result.findings == ()
    assert [(u.parameter, u.blocked_by) for u in result.unknown] == [("idle", None)]
    assert "4 of 4 elements have no gradient; not proved" in result.unknown[0].why


class Aside(nn.Module):
    """A layer that forward does not call by its name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.layer, self.way = nn.LayerNorm(4), nn.Linear(4, 4), way
        layer, layers = self.layer, {"only": [self.layer]}
        self.closure = lambda x: layer(x)
        self.of_self = lambda x: self.layer(x)
        self.of_list = [lambda x: layers["only"][0](x)]
        self.bound = self.layer.forward
        self.kept = self.layer.weight.data

    def forward(self, x: Tensor) -> Tensor:
        way = {
            "closure": self.closure,
            "self": self.of_self,
            "list": self.of_list[0],
            "bound": self.bound,
            "kept": lambda y: F.linear(y, self.kept, self.layer.bias),
        }
        return torch.tanh(way[self.way](self.norm(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["closure", "self", "list", "bound", "kept"])
def test_a_parameter_that_forward_reads_by_another_way_is_no_constant(way: str, device: str) -> None:
    """Such a layer would seem unused: its weight has no name where it is read."""
    if (way, device) == ("kept", "meta"):
        pytest.skip("without memory, nothing tells which parameter a kept tensor is")
    with torch.device(device):
        module = Aside(way)
        graph = trace(module, (torch.randn(2, 4),))
    assert graph.unused == () and all(node.op != "buffer" for node in graph.nodes.values())


def test_the_copy_of_a_module_with_closures_reads_its_own_parameters() -> None:
    module, x = Aside("closure"), torch.randn(2, 4)
    before, clone = module(x), copy_tensors(module)
    with torch.no_grad():
        clone.layer.weight.add_(1.0)
    assert torch.equal(module(x), before) and not torch.equal(clone(x), before)


@pytest.mark.parametrize(
    "turn",
    [
        lambda w: w.permute(0, 1),
        lambda w: w.permute(1, 0),
        lambda w: w.transpose(0, 0),
        lambda w: w.transpose(1, -2),
        lambda w: w.movedim(0, 0),
        lambda w: w.movedim(1, 0),
        lambda w: w.t().permute(1, 0),
    ],
)
def test_axes_that_keep_their_order_are_not_swapped(turn: Callable) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ turn(self.weight) + torch.sin(F.linear(x, turn(self.weight)))

    assert_same_function(Turned(), (torch.randn(2, 3, 4),), {})
