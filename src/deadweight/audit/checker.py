"""The checker: replays every proof without the rules that found it.

Structure, on the traced graph itself: everything that reads a changed value is a step of the proof, and no changed
value is an output. Steps, on numbers: each operation of a shift proof is run on real operands with and without random
shifts that follow the labels, and must change as the conclusion says. Gauges: a finite element of the group is applied
to all parameters it names, and the outputs must stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from deadweight.graph.evaluate import evaluate, float64_arguments, largest_difference
from deadweight.graph.node import Graph, Node, substitute
from deadweight.laws.claim import Claim
from deadweight.laws.dw009_query_key_basis import ContractionClaim
from deadweight.laws.scale_claim import ScaleClaim, scaled_parameters
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.turn_claim import TurnClaim
from deadweight.proof.steps import Step

Values = dict[str, Tensor]
STEP = 1e-9  # relative: one operation in float64 rounds at about 1e-15
WHOLE = 1e-8  # a whole narrow model, after a finite turn
TURN = 0.2  # size of the finite turn


def structure(graph: Graph, claims: Sequence[Claim]) -> dict[int, str]:
    """Claims (by place) whose steps do not cover everything that reads a changed value, with the gap."""
    refused = {}
    for place, claim in enumerate(claims):
        gap = uncovered(graph, claim.steps)
        if gap is not None:
            refused[place] = gap
    return refused


def uncovered(graph: Graph, steps: Sequence[Step]) -> str | None:
    seen = {s.node for s in steps}
    last = {s.node: s.value for s in steps}
    for name, value in last.items():
        if value is None:
            continue
        for reader in graph.users[name]:
            if reader.name not in seen:
                return f"{reader.name} reads the changed {name}, and no step says what follows"
        if name in graph.outputs:
            return f"the changed {name} is an output"
    return None


def node_values(graph: Graph, values: Values, inputs: Values) -> Values:
    """The value of every node, for replaying many proofs."""
    known: Values = {}

    def keep(node: Node, value: Tensor) -> Tensor:
        known[node.name] = value
        return value

    evaluate(graph, values, inputs, keep)
    return known


def replay(graph: Graph, claim: Claim, values: Values, inputs: Values, known: Values | None = None) -> str | None:
    """None if every step holds on numbers; else the first that does not."""
    if isinstance(claim, ShiftClaim):
        return replay_shift(graph, claim, known or node_values(graph, values, inputs))
    if isinstance(claim, (TurnClaim, ContractionClaim)) and claim.tier != "epsilon":
        return replay_turn(graph, claim, values, inputs)
    if isinstance(claim, ScaleClaim):
        return replay_scale(graph, claim, values, inputs)
    return None


def replay_shift(graph: Graph, claim: ShiftClaim, known: Values) -> str | None:
    changed: dict[str, object] = {}
    for number, step in enumerate(claim.steps):
        node = graph.nodes[step.node]
        if step.value is not None and not known_labels(step.value):
            return None  # too large to replay here: a narrow clone does
        fault = None if number == 0 or taken_over(step) else one_step(node, step, known, changed, seed=number)
        if fault is not None:
            return fault
        changed.pop(step.node, None)
        if step.value is not None:
            changed[step.node] = step.value
    return None


def known_labels(value: object) -> bool:
    return hasattr(value, "label") or isinstance(value, list)


def taken_over(step: Step) -> bool:
    return step.value is None and "takes it over" in step.rule


def one_step(node: Node, step: Step, known: Mapping[str, Tensor], changed: dict, seed: int) -> str | None:
    """Run the operation on shifted operands and compare what changes with the labels of the conclusion."""
    assert node.target is not None
    amounts = Amounts(seed)

    def shifted(name: str) -> object:
        value, shift = known[name], changed.get(name)
        if shift is None:
            return value
        if isinstance(shift, list):
            return [v if s is None else v + amounts.of(s.label) for v, s in zip(value, shift, strict=True)]
        return value + amounts.of(shift.label)

    after = node.target(
        *float64_arguments(substitute(node.args, shifted)), **float64_arguments(substitute(node.kwargs, shifted))
    )
    pairs = (
        zip(after, known[node.name], strict=True) if isinstance(after, (list, tuple)) else [(after, known[node.name])]
    )
    conclusions = step.value if isinstance(step.value, list) else [step.value]
    for (new, old), conclusion in zip(pairs, conclusions if len(conclusions) > 1 else conclusions * 99, strict=False):
        fault = contradicts(new, old, conclusion)
        if fault is not None:
            return f"{node.name} [{node.op}]: {fault}"
    return None


class Amounts:
    """A random amount for each label."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[int, float] = {0: 0.0}

    def of(self, labels: Tensor) -> Tensor:
        unique, place = labels.unique(return_inverse=True)
        for label in unique.tolist():
            if label not in self.known:
                self.known[label] = float(torch.randn((), generator=self.generator, dtype=torch.float64))
        return torch.tensor([self.known[label] for label in unique.tolist()], dtype=torch.float64)[place]


def contradicts(new: Tensor, old: Tensor, conclusion: object) -> str | None:
    if not new.is_floating_point():
        return None if torch.equal(new, old) else "an integer result changes"
    finite = torch.isfinite(old) & torch.isfinite(new)
    if not bool((finite | (old == new) | (torch.isnan(old) & torch.isnan(new))).all()):
        return "a number becomes none, or none a number"
    scale = float(old[finite].abs().max()) + 1.0 if bool(finite.any()) else 1.0
    moved = torch.where(finite & (old > -1e29), new - old, 0.0)
    labels = torch.zeros(old.shape, dtype=torch.int64) if conclusion is None else conclusion.label.expand(old.shape)  # type: ignore[attr-defined]
    if float(moved[labels == 0].abs().max() if bool((labels == 0).any()) else 0.0) > STEP * scale:
        return "an element called unchanged changes"
    unique, place = labels.unique(return_inverse=True)
    flat, where = moved.reshape(-1), place.reshape(-1)
    open_ = (finite & (old > -1e29)).reshape(-1)
    high = torch.full((len(unique),), -torch.inf, dtype=torch.float64).scatter_reduce(
        0, where[open_], flat[open_], "amax"
    )
    low = torch.full((len(unique),), torch.inf, dtype=torch.float64).scatter_reduce(
        0, where[open_], flat[open_], "amin"
    )
    spread = torch.where(torch.isfinite(high - low), high - low, 0.0)
    if float(spread.max()) > STEP * scale:
        return "elements with one label change differently"
    return None


def replay_turn(graph: Graph, claim: TurnClaim | ContractionClaim, values: Values, inputs: Values) -> str | None:
    """Apply a finite element of the group and compare the outputs."""
    generators = list(claim.generators())
    if not generators:
        return "the group is trivial"
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros_like(generators[0])
    for g in generators:
        total += float(torch.randn((), generator=generator, dtype=torch.float64)) * g
    total = total * (TURN / float(torch.linalg.matrix_norm(total, 2)))
    moved = turned_parameters(graph, claim.sites, torch.linalg.matrix_exp(total), values, inputs)
    error = largest_difference(evaluate(graph, values, inputs), evaluate(graph, moved, inputs))
    return None if error < WHOLE else f"a finite turn changes the outputs by {error:.1e}"


def replay_scale(graph: Graph, claim: ScaleClaim, values: Values, inputs: Values) -> str | None:
    """Scale every channel by a factor of its own, undo it in the gain, and compare the outputs."""
    s = torch.rand(claim.dof, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    moved = scaled_parameters(claim, graph, values, inputs, s)
    error = largest_difference(evaluate(graph, values, inputs), evaluate(graph, moved, inputs))
    return None if error < WHOLE else f"scaling the channels changes the outputs by {error:.1e}"


def turned_parameters(graph: Graph, sites: Iterable, matrix: Tensor, values: Values, inputs: Values) -> Values:
    """Every named parameter after the turn: written A·p, read p·A⁻¹."""
    moved = dict(values)
    inverse = torch.linalg.inv(matrix)
    for site in sites:
        parameter = moved[site.parameter]
        if site.role == "gain":
            gain = value_at(graph, site.value, values, inputs).reshape(-1)
            factor = torch.diagonal(matrix)[site.coordinate]
            moved[site.parameter] = parameter + (gain * (factor - 1)).reshape(parameter.shape)
            continue
        action = embedded(inverse if site.role == "in" else matrix, site.coordinate, site.copy)
        if site.gain is not None:
            gain = value_at(graph, site.gain, values, inputs).reshape(-1)
            gain = 1 / gain if site.role == "behind" else gain
            action = gain[:, None] * action / gain[None, :]
        along = parameter.movedim(site.axis, -1)
        along = along @ action if site.role == "in" else along @ action.T
        moved[site.parameter] = along.movedim(-1, site.axis)
    return moved


def embedded(matrix: Tensor, coordinate: Tensor, copy: Tensor | None) -> Tensor:
    """The matrix on the coordinates of one axis, copy by copy; indices outside the space stay."""
    action = matrix[coordinate][:, coordinate]
    if copy is not None:
        action = action * (copy[:, None] == copy[None, :])
    outside = coordinate == 0
    action[outside] = 0.0
    action[:, outside] = 0.0
    action[outside, outside] = 1.0
    return action


def value_at(graph: Graph, name: str | None, values: Values, inputs: Values) -> Tensor:
    assert name is not None
    return values[name] if name in values else node_values(graph, values, inputs)[name]
