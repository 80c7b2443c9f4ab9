"""The walk of a proof is a part of the graph: each step reads earlier ones, and the parameters it names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.result import Audit, Finding


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return torch.tanh(self.out(scores.softmax(-1) @ self.v(x)))


@pytest.fixture(scope="module")
def audited() -> Audit:
    return deadweight.audit(Attention(), (torch.randn(2, 5, 8),))


@pytest.fixture(scope="module")
def demo() -> Audit:
    return deadweight.audit("demo")


def finding_of(audit: Audit, code: str) -> Finding:
    return next(f for f in audit.findings if f.code == code)


def test_a_key_bias_walks_from_its_addition_to_the_softmax(audited: Audit) -> None:
    walk = finding_of(audited, "DW002").walk
    assert [v.op for v in walk] == ["parameter", "aten.add", "aten.matmul", "softmax"]
    assert [v.reads for v in walk] == [(), (0,), (1,), (2,)]  # the transposition between add and matmul is no step
    assert walk[0].node == "k.bias"
    assert walk[1].parameters == ("k.bias",)


def test_a_fold_names_the_weight_that_it_passes_and_ends_where_it_is_absorbed(audited: Audit) -> None:
    walk = finding_of(audited, "DW003").walk
    passed = [v.parameters for v in walk if v.op == "linear"]
    assert passed == [("out.weight",)]
    assert "out.bias takes it over" in walk[-1].rule
    assert walk[-1].reads == (len(walk) - 2,)


def test_every_step_reads_only_earlier_steps_and_says_what_the_proof_says(audited: Audit, demo: Audit) -> None:
    for f in (*audited.findings, *demo.findings):
        assert all(j < i for i, v in enumerate(f.walk) for j in v.reads)
        lines = [line for line in f.proof if "in other places" not in line]
        assert [f"{v.node} [{v.op}]: {v.rule} → {v.conclusion}" for v in f.walk] == lines


def test_operations_that_only_move_elements_are_counted_in_one_line(audited: Audit) -> None:
    lines = {line for f in audited.findings for line in f.proof if "only move" in line}
    assert "1 operation that only moves elements → the same values, in other places" in lines


def test_the_walk_of_a_repeated_block_names_its_own_parameters(demo: Audit) -> None:
    for f in demo.findings:
        if f.code == "DW002":
            layer = f.parameter.split(".attn")[0]
            assert {p for v in f.walk for p in v.parameters} == {f.parameter}
            assert f.walk[0].node.startswith(layer)


def test_an_audit_knows_the_shape_of_every_parameter(audited: Audit) -> None:
    module = Attention()
    assert dict(audited.shapes) == {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_an_audit_of_a_collapsed_model_knows_the_shapes_of_all_blocks(demo: Audit) -> None:
    assert sum(torch.Size(shape).numel() for _, shape in demo.shapes) == demo.parameters
