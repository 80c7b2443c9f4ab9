"""Auditing a small module, and checking what the audit says against plain autograd on the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.result import Audit, Finding
from deadweight.claims.claim import Claim
from deadweight.claims.point import Point
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search

torch.set_num_threads(1)  # the modules are tiny: more threads only wait for each other

ZERO = 1e-10  # of a typical gradient: rounding leaves about 1e-15
LIVE = 1e-9  # of the largest singular value: rounding leaves about 1e-15, live directions 1e-5
VOCABULARY = 11
STAYS = 1e-10  # of outputs of order one, after a motion of order one: float64 rounds at about 1e-16


@dataclass(frozen=True)
class Told:
    """What an audit says, by law and parameter."""

    audit: Audit

    def found(self, code: str, parameter: str) -> list[Finding]:
        return [f for f in self.audit.findings if f.code == code and f.parameter == parameter]

    def pieces(self, code: str, parameter: str) -> list[tuple[int, int]]:
        """The rows that a law claims of a parameter, joined."""
        size = 10**6
        found = [p for f in self.found(code, parameter) for p in (f.slice or ((0, size),))]
        return sorted((a, b) for a, b in found)

    def dead(self, parameter: str) -> bool:
        """Whether every element of the parameter is claimed dead, one by one."""
        found = [f for f in self.audit.findings if f.parameter == parameter and f.verdict == "dead"]
        return any(f.slice is None and f.dof == f.elements for f in found)

    def dof(self, code: str) -> int:
        return sum(f.dof for f in self.audit.findings if f.code == code)

    def blockers(self, parameter: str) -> set[str | None]:
        return {u.blocked_by for u in self.audit.unknown if u.parameter == parameter}

    def reasons(self, parameter: str) -> str:
        return " | ".join(u.why for u in self.audit.unknown if u.parameter == parameter)

    def laws_of(self, parameter: str) -> set[str]:
        return {f.code for f in self.audit.findings if f.parameter == parameter}


@pytest.fixture
def examine() -> Callable[..., Told]:
    """Audit a module and hold the answer against gradients and the nullity of the module's own Jacobian."""

    def run(module: nn.Module, *inputs: Tensor, **options: Any) -> Told:
        torch.manual_seed(0)
        told = Told(deadweight.audit(module, inputs, **options))
        assert told.audit.untraced is None, told.audit.untraced
        contradicted = [u for u in told.audit.unknown if "contradicts" in u.why or "replay" in u.why]
        assert not contradicted, contradicted
        assert_sound(module, inputs, told.audit.findings, **options)
        return told

    return run


def assert_sound(module: nn.Module, inputs: tuple[Tensor, ...], findings: tuple[Finding, ...], **options: Any) -> None:
    """Dead elements have no gradient; all claims together do not exceed the nullity. Shares no code with the audit."""
    rows, columns = jacobian(module, inputs, **options)
    typical = rows.abs().mean()
    for finding in findings:
        if finding.verdict == "dead" and "1/" not in finding.note:
            grads = rows[:, columns[finding.parameter]]
            shape = dict(module.named_parameters())[finding.parameter].shape
            assert residue(finding, grads.reshape(-1, *shape)) < ZERO * typical, finding
    singular = torch.linalg.svdvals(rows)
    nullity = rows.shape[1] - int((singular > LIVE * singular[0]).sum())
    claimed = sum(f.dof for f in findings if f.tier != "epsilon")
    assert claimed <= nullity, (claimed, nullity, findings)


def residue(finding: Finding, grads: Tensor) -> float:
    """The largest gradient along what is claimed dead: elements one by one, or what moves together."""
    picked = grads
    if finding.slice is not None:
        picked = torch.cat([grads[:, a:b] for a, b in finding.slice], 1)
    if finding.dof == finding.elements:
        return float(picked.abs().max())
    if picked.ndim == 2:  # a vector in equal blocks that move together
        return float(picked.reshape(len(picked), finding.dof, -1).sum(2).abs().max())
    sums = [picked.sum(1).abs().max(), picked.flatten(1, -2).sum(-1).abs().max() if picked.ndim == 3 else torch.inf]
    wide = picked.sum(-1).abs().max()  # rows of a table
    rows = picked.flatten(2).sum(-1).abs().max()  # rows of a weight that is centred itself
    return float(min(*map(float, sums), float(wide), float(rows)))


def jacobian(
    module: nn.Module, inputs: tuple[Tensor, ...], *, training: bool = False, output: str = "logits", **_: Any
) -> tuple[Tensor, dict[str, slice]]:
    """Rows: outputs of the module itself at random parameters and inputs, float64. Columns: its parameters."""
    clone = copy.deepcopy(module).double().train(training)
    generator = torch.Generator().manual_seed(1)
    named = dict(clone.named_parameters())
    with torch.no_grad():
        for parameter in named.values():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            parameter.requires_grad_()
    count = sum(p.numel() for p in named.values())
    rows: list[Tensor] = []
    while sum(map(len, rows)) < 1.3 * count and len(rows) < 60:
        out = clone(*[redrawn(x, generator) for x in inputs])
        out = out if isinstance(out, tuple) else (out,)
        out = (out[0].softmax(-1), *out[1:]) if output == "probabilities" else out
        flat = torch.cat([o.reshape(-1) for o in out])
        eye = torch.eye(len(flat), dtype=torch.float64)
        grads = torch.autograd.grad(flat, list(named.values()), eye, is_grads_batched=True, allow_unused=True)
        parts = [
            torch.zeros(len(flat), p.numel()) if g is None else g for g, p in zip(grads, named.values(), strict=True)
        ]
        rows.append(torch.cat([p.reshape(len(flat), -1) for p in parts], 1))
    columns, start = {}, 0
    for name, parameter in named.items():
        columns[name] = slice(start, start := start + parameter.numel())
    return torch.cat(rows), columns


def redrawn(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, VOCABULARY, x.shape, generator=generator)


@pytest.fixture
def true_claims() -> Callable[..., tuple[Graph, list[Claim]]]:
    """What the search claims of a module, checker and evidence aside: every claim is moved along.

    Outputs and the shapes of all parameters must stay as they are.
    """

    def run(module: nn.Module, *inputs: Tensor, training: bool = False) -> tuple[Graph, list[Claim]]:
        graph = canonical(trace(module.double().train(training), inputs))
        found = search(graph).claims
        values = {n: t.detach() for n, t in graph.tensors.items()}
        point = Point(graph, values, dict(zip(graph.inputs, inputs, strict=True)))
        for claim in found:
            moved = claim.member(point, torch.Generator().manual_seed(1))
            assert all(t.shape == values[n].shape for n, t in moved.items()), claim
            for new, old in zip(point.at(moved).outputs, point.outputs, strict=True):
                assert claim.tier == "epsilon" or float((new - old).abs().max()) < STAYS, claim
        return graph, found

    return run
