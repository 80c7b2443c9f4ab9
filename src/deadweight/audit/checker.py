"""The checker: replays every proof without the rules that found it.

Structure, on the traced graph itself: everything that reads a changed value is a step of the proof, and no changed
value is an output. Steps, on numbers: each operation of a shift proof is run on real operands with and without random
shifts that follow the labels, and must change as the conclusion says; steps on values of more than
`LARGEST_REPLAYED` elements are counted instead. Motions: parameters are moved a long way along
every claim (a dead one by a lot, a gauge by a finite member of its group), and the outputs must stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.claims.claim import Claim
from deadweight.claims.point import Point, Values
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.graph.evaluate import largest_difference
from deadweight.graph.node import Graph, Node, float64_arguments, substitute
from deadweight.proof.operation_groups import LOW_FILL
from deadweight.proof.steps import Step

STEP = 1e-9  # relative: one operation in float64 rounds at about 1e-15
MASKED = LOW_FILL / 2  # what is lower was filled in by a mask; sums behind it move it a little
WHOLE = 1e-8  # a whole narrow model, after a finite turn


def structure(graph: Graph, claims: Sequence[Claim]) -> dict[int, str]:
    """Claims, by index, whose steps miss a reader of a changed value; with that reader."""
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


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay, by the index of the claim."""

    faults: dict[int, str]  # why a step, or the motion as a whole, does not hold on numbers
    skipped: dict[int, int]  # how many steps were not replayed, because they have too many labels to keep


def replay(claims: Sequence[Claim], point: Point) -> Replay:
    """Run every step of every shift proof on numbers, and move a long way along every claim."""
    faults, skipped = dict[int, str](), dict[int, int]()
    for place, claim in enumerate(claims):
        if isinstance(claim, ShiftClaim):
            fault, count = replay_shift(point.graph, claim, point.nodes)
            faults |= {} if fault is None else {place: fault}
            skipped |= {place: count} if count else {}
    moving = [i for i, c in enumerate(claims) if i not in faults and c.tier != "epsilon"]
    return Replay(faults | replay_motions({i: claims[i] for i in moving}, point), skipped)


def replay_motions(claims: dict[int, Claim], point: Point) -> dict[int, str]:
    """Move along all claims and compare the outputs once; where they differ, along each half, and so on."""
    after, faults = moved_along(claims, point)
    error = largest_difference(point.outputs, after.outputs)
    if error < WHOLE:
        return faults
    rest = [place for batch in batches(claims) for place in batch if place not in faults]
    if len(rest) == 1:
        return faults | {rest[0]: f"a finite motion changes the outputs by {error:.1e}"}
    for half in (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
        faults |= replay_motions({place: claims[place] for place in half}, point)
    return faults


def moved_along(claims: dict[int, Claim], point: Point) -> tuple[Point, dict[int, str]]:
    """The point after a random finite motion along every claim, and the claims without a valid motion."""
    moved, faults = point, dict[int, str]()
    for batch in batches(claims):
        changes: Values = {}
        for place, claim in batch.items():
            change = motion_of(place, claim, moved)
            if not isinstance(claim, ShiftClaim) and overlap(changes, change):  # products do not add up: one by one
                moved, changes = moved.at({n: moved.values[n] + t for n, t in changes.items()}), {}
                change = motion_of(place, claim, moved)
            if any(t.shape != point.values[n].shape for n, t in change.items()):
                faults[place] = "the claimed motion does not have the parameter's shape"  # broadcasting would hide it
                continue
            if claim.dof and not any(bool(t.any()) for t in change.values()):
                faults[place] = "the claimed motion moves nothing"
            changes |= {n: changes[n] + t if n in changes else t for n, t in change.items()}
            del change
        moved = moved.at({n: moved.values[n] + changes.pop(n) for n in list(changes)})
    return moved, faults


def overlap(one: Values, other: Values) -> bool:
    """Whether two changes of parameters meet in some element."""
    return any(bool(((one[n] != 0) & (other[n] != 0)).any()) for n in one.keys() & other.keys())


def motion_of(place: int, claim: Claim, point: Point) -> Values:
    """By how much parameters move along a random finite motion of a claim."""
    moved = claim.member(point, torch.Generator().manual_seed(place))
    return {n: moved.pop(n) - point.values[n] for n in list(moved)}  # one at a time: they may be large


def batches(claims: dict[int, Claim]) -> list[dict[int, Claim]]:
    """Claims of one law at a time: they move different parameters, or add to each other.

    Those whose motion depends on activations come first, while the parameters are where these are known.
    """
    by_kind: dict[tuple[str, type, bool], dict[int, Claim]] = {}
    for place, claim in claims.items():
        key = (claim.code, type(claim), isinstance(claim, ShiftClaim) and claim.lost is not None)
        by_kind.setdefault(key, {})[place] = claim
    return sorted(by_kind.values(), key=lambda batch: not any(map(meets_activations, batch.values())))


def meets_activations(claim: Claim) -> bool:
    """Whether a shift passes through a product of activations before something absorbs it."""
    return isinstance(claim, ShiftClaim) and bool(claim.absorbers) and any(s.op == "aten.matmul" for s in claim.steps)


def replay_shift(graph: Graph, claim: ShiftClaim, known: Values) -> tuple[str | None, int]:
    """The first fault among the steps, if any; and how many steps cannot be replayed without labels."""
    changed: dict[str, object] = {}
    hidden, skipped = set[str](), 0  # changed values whose labels are not kept
    for number, step in enumerate(claim.steps):
        node = graph.nodes[step.node]
        labelled = step.value is not True  # a step on a large value says only that it moved
        source = number == 0 or node.op == "parameter"  # what is moved, not what follows from it
        if not source and not taken_over(step):
            if not labelled or hidden.intersection(node.inputs):
                skipped += 1
            elif fault := one_step(node, step, known, changed, seed=number):
                return fault, skipped
        changed.pop(step.node, None)
        hidden.discard(step.node)
        if not labelled:
            hidden.add(step.node)
        elif step.value is not None:
            changed[step.node] = step.value
    return None, skipped


def taken_over(step: Step) -> bool:
    return step.value is None and step.kind == "absorbed"


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
    several = isinstance(after, (list, tuple))
    pairs = list(zip(after, known[node.name], strict=True)) if several else [(after, known[node.name])]
    conclusions = step.value if isinstance(step.value, list) else [step.value] * len(pairs)
    if len(conclusions) != len(pairs):
        return f"{node.name} [{node.op}]: {len(pairs)} results, and conclusions about {len(conclusions)}"
    for (new, old), conclusion in zip(pairs, conclusions, strict=True):
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
    if not old.numel() and new.shape == old.shape:
        return None  # nothing can change
    if not new.is_floating_point():
        return None if torch.equal(new, old) else "an integer result changes"
    finite = torch.isfinite(old) & torch.isfinite(new)
    if not bool((finite | (old == new) | (torch.isnan(old) & torch.isnan(new))).all()):
        return "a result becomes NaN or infinite, or stops being so"
    open_ = finite & (old > MASKED)  # a masked place may count as shifted by anything, and says nothing about the scale
    scale = float(old[open_].abs().max()) + 1.0 if bool(open_.any()) else 1.0
    moved = torch.where(open_, new - old, 0.0)
    labels = torch.zeros(old.shape, dtype=torch.int64) if conclusion is None else conclusion.label.expand(old.shape)  # type: ignore[attr-defined]
    if float(moved[labels == 0].abs().max() if bool((labels == 0).any()) else 0.0) > STEP * scale:
        return "an element called unchanged changes"
    unique, place = labels.unique(return_inverse=True)
    flat, where, open_ = moved.reshape(-1), place.reshape(-1), open_.reshape(-1)
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
