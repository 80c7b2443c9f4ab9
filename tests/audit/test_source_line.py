"""A finding names the line of the user's code that constructs the module of a parameter, else the line that uses it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import deadweight
from deadweight.audit.source_line import source_line
from deadweight.graph.canonical import canonical
from deadweight.graph.trace import build_graph, on_values, trace

HERE = Path(__file__)
LINES = HERE.read_text(encoding="utf-8").splitlines()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)  # the key projection
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))  # the pair
        self.offset = None
        self.offset = nn.Parameter(torch.randn(8))  # the offset

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT  # the key is used
        return self.pair(scores.softmax(-1) @ x + self.offset)


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(LINES, start=1) if line.endswith(f"# {words}"))


def place_of(model: nn.Module, parameter: str) -> tuple[str, int, str]:
    graph = canonical(trace(model, (torch.randn(2, 5, 8),)))
    line = source_line(model, graph, graph.node_of[parameter])
    assert line is not None
    return line.file, line.line, line.role


@pytest.mark.parametrize(
    ("parameter", "words"),
    [("k.bias", "the key projection"), ("pair.0.bias", "the pair"), ("offset", "the offset")],
)
def test_a_parameter_is_found_where_its_module_is_constructed(parameter: str, words: str) -> None:
    assert place_of(Attention(), parameter) == (str(HERE), line_of(words), "constructed")


def test_a_module_that_no_assignment_constructs_is_found_where_it_is_used() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("layers", nn.ModuleDict({"inner": nn.Linear(8, 8)}))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["inner"](x)  # used through a dictionary

    assert place_of(Looked(), "layers.inner.bias") == (str(HERE), line_of("used through a dictionary"), "used")


def test_every_finding_of_an_audit_has_its_line_its_fix_and_its_savings() -> None:
    result = deadweight.audit(Attention(), torch.randn(2, 5, 8))
    key = next(f for f in result.findings if f.parameter == "k.bias" and f.code == "DW002")
    assert key.source is not None and key.source.line == line_of("the key projection")
    assert (key.payoff.parameters, key.payoff.bytes, key.payoff.flops) == (8, 32, 8)
    assert key.fix.startswith("build the key projection with bias=False")
    assert all(f.source is not None and f.fix for f in result.findings)


def test_steps_of_a_proof_are_named_by_module_and_line() -> None:
    result = deadweight.audit(Attention(), torch.randn(2, 5, 8), select=["DW002"])
    steps = result.findings[0].proof
    assert steps[1].startswith(f"k, {HERE.name}:{line_of('the key is used')} [")
    assert any(step.startswith(f"the model, {HERE.name}:") and "[softmax]" in step for step in steps)


def test_an_audit_leaves_no_trace_of_torch_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        deadweight.audit(Attention(), torch.randn(2, 5, 8))
    assert not [record.name for record in caplog.records if record.name.startswith("torch")]


class Branching(nn.Module):
    """Python reads a value, so that the model is traced on the values of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.read = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 0).any()):
            x = (x @ self.k(x).mT).softmax(-1) @ x  # the branch
        return self.read(x)


def test_steps_of_a_model_that_is_traced_on_values_are_named_by_their_lines() -> None:
    result = deadweight.audit(Branching(), torch.randn(2, 5, 8).abs(), select=["DW002"])
    assert result.specialised is not None
    line = f"{HERE.name}:{line_of('the branch')}"
    assert any(step.startswith(f"{line} [softmax]") for step in result.findings[0].proof)


def test_a_library_traced_on_values_is_not_blamed_on_the_line_that_audits_it() -> None:
    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=11, num_local_experts=2, max_position_embeddings=8,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    graph = canonical(build_graph(model, on_values(model, (torch.tensor([[1, 2, 3]]),), {"use_cache": False})))
    lines = {Path(node.origin.file).name for node in graph.nodes.values() if node.origin is not None}
    assert "modeling_mixtral.py" in lines and HERE.name not in lines
