"""Models whose Python asks for values are traced on those of the example, and hide nothing by that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.evaluate import evaluate, largest_difference
from deadweight.graph.named_tensors import tensors_in
from deadweight.graph.trace import TraceError, trace

SAME = 1e-12  # relative: a tiny model in float64 rounds at about 1e-15
X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.3, 0.7, -1.0, 0.2], [2.0, 1.0, 1.0, -0.5]])


class Base(nn.Module):
    """Two layers, a table and a scalar; subclasses ask for values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(1.5))


class Branch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.other(-x)


class BranchOnParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.scale > 0 else self.other(x)


class Count(Base):
    """The number of positive units divides the result: no tensor of the graph leads from `other` to it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (self.other(x) > 0).nonzero().shape[0]


class CountByWhere(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / torch.where(self.other(x) > 0)[0].shape[0]


class CountOfUnique(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / len(self.other(x).argmax(-1).unique())


class CountBySum(Base):
    def forward(self, x: Tensor) -> Tensor:
        n = int((self.other(x) > 0).sum())
        return self.layer(x) * n if n > 2 else self.layer(x)


class Equal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if torch.equal(self.other(x), x) else self.layer(-x)


class Masked(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[self.other(x).sum(-1) > -9])


class Listed(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.other(x).argmax(-1).tolist()
        return self.layer(x) + self.table[rows[0] % 3] if rows[0] < 9 else x


class Experts(Base):
    """Each row goes to one expert of six: three get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 6)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            out[rows] = weight[rows, None] * expert(x[rows])
        return out


class InPlace(Base):
    """Mutations, no_grad and a branch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] += 1
        with torch.no_grad():
            z = self.other(x).relu_()
        return y.mul_(z) if bool((x[0] > 0).any()) else y


ASKING = [Branch, BranchOnParameter, Count, CountByWhere, CountOfUnique, CountBySum, Equal, Masked, Listed, Experts]
ASKING += [InPlace]


def assert_same_function(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    kwargs = kwargs or {}
    graph = trace(module, args, kwargs)
    wide = lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v  # noqa: E731
    expected = list(
        tensors_in(copy.deepcopy(module).double()(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()}))
    )
    for result in (graph, canonical(graph)):
        outputs = evaluate(result, result.tensors, bind(result, args, kwargs))
        assert largest_difference(expected, outputs[: len(expected)]) < SAME


@pytest.mark.parametrize("kind", ASKING)
def test_a_model_that_asks_for_values_is_traced_as_it_runs(kind: type[nn.Module]) -> None:
    assert_same_function(kind().eval(), (X,))


@pytest.mark.parametrize("kind", ASKING)
def test_the_note_names_the_line_that_asks(kind: type[nn.Module]) -> None:
    (note, *_) = trace(kind(), (X,)).specialised
    assert "inputs that take the same path" in note and "test_value_tracing.py:" in note


def test_a_model_that_asks_for_nothing_has_no_note() -> None:
    assert trace(nn.Linear(4, 4), (X,)).specialised == ()


HIDING = [Count, CountByWhere, CountOfUnique, CountBySum, Equal, Masked, Listed]


@pytest.mark.parametrize("kind", HIDING)
def test_a_parameter_that_only_decides_the_path_is_not_called_dead(kind: type[nn.Module]) -> None:
    graph = canonical(trace(kind(), (X,)))
    assert {graph.node_of["other.weight"], graph.node_of["other.bias"]} <= graph.live
    claimed = {f.parameter for f in deadweight.audit(kind(), X).findings}
    assert not any(name.startswith("other") for name in claimed)


def test_a_parameter_of_a_branch_not_taken_is_not_examined() -> None:
    graph = trace(Branch(), (X,))
    assert not {"other.weight", "other.bias"} & set(graph.parameters.values()) and graph.unused == ()
    assert "not examined" in graph.specialised[1] and "table" in graph.specialised[1]
    assert deadweight.audit(Branch(), X).findings == ()


def test_an_expert_without_tokens_is_not_examined() -> None:
    module = Experts()
    chosen = set(module.router(X).argmax(-1).tolist())
    graph = trace(module, (X,))
    kept = {int(n.split(".")[1]) for n in graph.parameters.values() if n.startswith("experts")}
    assert 0 < len(chosen) < 6 and kept == chosen


class SometimesTwice(Base):
    """A layer that all rows pass, and some a second time: in the example, none."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        chosen = y[:, 0] > 100
        return torch.cat([y, self.layer(y[chosen])])


def test_a_layer_that_also_meets_no_rows_is_not_examined() -> None:
    graph = trace(SometimesTwice(), (X,))
    assert not {"layer.weight", "layer.bias"} & set(graph.parameters.values())


def test_rows_that_the_path_does_not_read_keep_a_table_from_being_examined() -> None:
    assert "table" not in trace(Listed(), (X,)).parameters.values()


class Softened(Base):
    """The branch depends on a softmax, which ignores what all its inputs share."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.other(x).softmax(-1)
        return weights * 2 if bool(weights[0, 0] > 0.1) else weights


def test_a_law_holds_where_it_leaves_the_path_alone() -> None:
    result = deadweight.audit(Softened(), X)
    assert {(f.code, f.parameter) for f in result.findings} >= {("DW018", "other.bias"), ("DW018", "other.weight")}
    assert any("same path" in note for note in result.notes)


class Multiplied(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


class TakesScale(Multiplied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.item()


class TakesScaleAsList(Multiplied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.tolist()


class TakesInput(Multiplied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.max())


class TakesArray(Multiplied):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.scale.detach().numpy())


@pytest.mark.parametrize("kind", [TakesScale, TakesScaleAsList, TakesInput, TakesArray])
def test_a_float_that_python_computes_with_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"Python reads a |numpy\(\)") as caught:
        trace(kind(), (X,))
    assert str(caught.value).isprintable()


def test_an_integer_of_an_integer_input_is_a_size() -> None:
    class Cut(Base):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.layer(x[: int(lengths.max())])

    module, lengths = Cut(), torch.tensor([1, 2])
    graph = trace(module, (X, lengths))
    assert "lengths at" in graph.specialised[0] and "parameters at" not in graph.specialised[0]
    assert_same_function(module, (X, lengths))


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL * 0, CAUSAL.isinf()], ids=["causal", "none", "boolean"])
def test_an_encoder_with_a_mask_is_traced(mask: Tensor) -> None:
    module, x = encoder(), torch.randn(2, 5, 8)
    assert_same_function(module, (x,), {"mask": mask})
    assert "mask at torch/nn/modules/transformer.py" in trace(module, (x,), {"mask": mask}).specialised[0]


def test_an_encoder_in_eval_shows_its_softmax() -> None:
    graph = trace(encoder(), (torch.randn(2, 5, 8),))
    assert "aten.softmax" in {n.op for n in graph.nodes.values()} and graph.specialised == ()


def test_key_biases_of_a_masked_encoder_are_dead() -> None:
    result = deadweight.audit(encoder(), {"src": torch.randn(2, 5, 8), "mask": CAUSAL})
    assert {f.parameter for f in result.findings if f.code == "DW002"} == {
        f"layers.{i}.self_attn.in_proj_bias" for i in range(2)
    }


def test_tracing_leaves_the_fast_path_as_it_was() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    trace(encoder(), (torch.randn(2, 5, 8),))
    with pytest.raises(TraceError):
        trace(TakesScale(), (X,))
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_model_that_is_proved_for_one_path_is_not_reduced() -> None:
    with pytest.raises(DeadweightError, match="hold for one path of its code only"):
        deadweight.reduce(Experts(), inputs=X)


class Keeping(nn.Module):
    """Keeps what it made for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return self.kept * 2


@pytest.mark.parametrize("build", [Keeping, Experts, Branch])
def test_the_module_is_left_as_it_was(build: Callable[[], nn.Module]) -> None:
    module = build()
    before = {name: p.clone() for name, p in module.state_dict().items()}
    trace(module, (X,))
    assert getattr(module, "kept", None) is None
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_what_is_written_into_a_buffer_in_eval_counts_as_returned() -> None:
    class Cache(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.copy_(self.other(x))
            return self.layer(x)

    graph = canonical(trace(Cache().eval(), (X,)))
    assert graph.node_of["other.weight"] in graph.live
    assert graph.node_of["table"] not in graph.live


def test_one_hot_without_a_number_of_classes_counts_them() -> None:
    class Classes(Base):
        def forward(self, x: Tensor) -> Tensor:
            return F.one_hot(self.other(x).argmax(-1)).sum() * self.layer(x)

    graph = canonical(trace(Classes(), (X,)))
    assert graph.node_of["other.weight"] in graph.live


class Named(nn.Module):
    """Layers by name, and the name made of a number that data decide."""

    def __init__(self, *, fraction: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer_{i}": nn.Linear(3, 3) for i in range(2)})
        self.fraction = fraction

    def forward(self, x: Tensor) -> Tensor:
        best = x.mean((0, 1)).argmax() % 2
        name = f"layer_{best}" if not self.fraction else f"layer_{int(float(f'{x.mean():.3f}') > 9)}"
        return self.layers[name](x)


def test_a_number_in_a_name_is_that_of_the_example() -> None:
    x = torch.zeros(2, 4, 3)
    x[..., 1] = 1.0  # the second is the largest
    graph = trace(Named(fraction=False), (x,), {})
    read = {graph.parameters[n] for n in graph.parameters if graph.users[n]}
    assert read == {"layers.layer_1.weight", "layers.layer_1.bias"} and graph.specialised


def test_a_float_in_a_name_is_refused() -> None:
    with pytest.raises(TraceError, match="reads a float32 number"):
        trace(Named(fraction=True), (torch.randn(2, 4, 3),), {})
