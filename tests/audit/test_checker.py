"""The checker refuses proofs that were tampered with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deadweight.audit.checker import contradicts, replay, structure
from deadweight.claims.contraction_claim import ContractionClaim
from deadweight.claims.point import Point
from deadweight.claims.shift_claim import ShiftClaim
from deadweight.claims.turn_claim import TurnClaim
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.proof.shift import Shift

torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.output(torch.softmax(scores, -1) @ self.value(x))


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return canonical(trace(Attention().double(), (torch.randn(2, 3, 4, dtype=torch.float64),)))


@pytest.fixture(scope="module")
def claims(graph: Graph) -> list[Any]:
    return search(graph).claims


@pytest.fixture
def point(graph: Graph) -> Point:
    values = {n: t.detach() for n, t in graph.tensors.items()}
    return Point(graph, values, {graph.inputs[0]: torch.randn(2, 3, 4, dtype=torch.float64)})


def fault(claim: Any, point: Point) -> str:
    """Why one claim does not replay; empty if it does."""
    return replay([claim], point).faults.get(0, "")


def pick(claims: list[Any], code: str) -> Any:
    return next(c for c in claims if c.code == code)


def test_honest_proofs_pass(graph: Graph, claims: list[Any], point: Point) -> None:
    assert {c.code for c in claims} >= {"DW002", "DW003", "DW009", "DW010"}
    assert structure(graph, claims) == {}
    assert replay(claims, point).faults == {}
    assert [fault(c, point) for c in claims] == [""] * len(claims)


def without_one(steps: tuple) -> Iterator[tuple]:
    for i in range(1, len(steps)):
        if steps[i].rule != "the space is written here":  # where a change begins nothing has to be read
            yield (*steps[:i], *steps[i + 1 :])


@pytest.mark.parametrize("code", ["DW002", "DW003", "DW009", "DW010"])
def test_a_missing_step_is_refused(graph: Graph, claims: list[Any], code: str) -> None:
    claim = pick(claims, code)
    for steps in without_one(claim.steps):
        nodes = {s.node for s in steps}
        if nodes != {s.node for s in claim.steps}:  # an absorbed node has two steps: its last one decides
            assert structure(graph, [replace(claim, steps=steps)]), steps


def test_a_proof_that_stops_at_the_output_is_refused(graph: Graph, claims: list[Any]) -> None:
    claim = pick(claims, "DW003")
    last = claim.steps[-1]
    steps = (*claim.steps[:-1], replace(last, node=graph.outputs[0], value=claim.steps[0].value))
    assert structure(graph, [replace(claim, steps=steps)])


def relabelled(claim: ShiftClaim, change: Any) -> ShiftClaim:
    def changed(value: Any) -> Any:
        return replace(value, label=change(value.label)) if isinstance(value, Shift) else value

    return replace(claim, steps=(claim.steps[0], *[replace(s, value=changed(s.value)) for s in claim.steps[1:]]))


@pytest.mark.parametrize("code", ["DW002", "DW003"])
def test_equal_labels_for_different_shifts_are_refused(
    graph: Graph, claims: list[Any], point: Point, code: str
) -> None:
    lie = relabelled(pick(claims, code), lambda label: torch.ones_like(label))
    assert fault(lie, point)


@pytest.mark.parametrize("code", ["DW002", "DW003"])
def test_a_shift_called_zero_is_refused(graph: Graph, claims: list[Any], point: Point, code: str) -> None:
    claim = pick(claims, code)
    steps = (claim.steps[0], *[replace(s, value=None) for s in claim.steps[1:]])
    assert fault(replace(claim, steps=steps), point)


@pytest.mark.parametrize("code", ["DW009", "DW010"])
def test_a_wrong_or_missing_site_is_refused(graph: Graph, claims: list[Any], point: Point, code: str) -> None:
    claim = pick(claims, code)
    assert isinstance(claim, (TurnClaim, ContractionClaim))
    for i, site in enumerate(claim.sites):
        if graph.parameters[site.parameter] == "key.bias":
            continue  # dead: it may stay where it is
        others = (*claim.sites[:i], *claim.sites[i + 1 :])
        assert "changes the outputs" in fault(replace(claim, sites=others), point), site
        if site.role in ("in", "out") and graph.nodes[site.parameter].shape == (4, 4):
            turned = replace(site, axis=1 - site.axis)
            assert "changes the outputs" in fault(replace(claim, sites=(*others, turned)), point), site


class Misfit(ShiftClaim):
    """A claim whose motion is larger than its parameter."""

    def member(self, point: Point, generator: torch.Generator) -> dict[str, Tensor]:
        return {n: t.expand(2, *t.shape) for n, t in super().member(point, generator).items()}


class Still(ShiftClaim):
    """A claim whose motion moves nothing."""

    def member(self, point: Point, generator: torch.Generator) -> dict[str, Tensor]:
        return {n: point.values[n] for n in super().member(point, generator)}


def remade(claim: ShiftClaim, kind: type[ShiftClaim]) -> ShiftClaim:
    return kind(**{f.name: getattr(claim, f.name) for f in fields(claim)})


def test_a_motion_that_does_not_fit_its_parameter_or_moves_nothing_is_refused(claims: list[Any], point: Point) -> None:
    claim = pick(claims, "DW002")
    assert fault(remade(claim, ShiftClaim), point) == ""
    assert "does not have the parameter's shape" in fault(remade(claim, Misfit), point)
    assert "moves nothing" in fault(remade(claim, Still), point)


def test_one_false_claim_among_true_ones_is_named_alone(claims: list[Any], point: Point) -> None:
    true, wrong = pick(claims, "DW010"), pick(claims, "DW009")
    wrong = replace(wrong, sites=wrong.sites[1:])
    faults = replay([true, wrong, true], point).faults
    assert set(faults) == {1} and "changes the outputs" in faults[1]


def test_a_key_bias_that_rotary_keeps_alive_is_refused_when_claimed_by_hand(claims: list[Any], graph: Graph) -> None:
    class Rotated(Attention):
        def forward(self, x: Tensor) -> Tensor:
            turn = torch.arange(3, dtype=x.dtype).cos().unsqueeze(-1)
            scores = self.query(x) @ (self.key(x) * turn).transpose(1, 2)
            return self.output(torch.softmax(scores, -1) @ self.value(x))

    other = canonical(trace(Rotated().double(), (torch.randn(2, 3, 4, dtype=torch.float64),)))
    assert structure(other, [pick(claims, "DW002")])


INFINITE, NONE = float("inf"), float("nan")
# numbers before, by how much each changes, the labels of the conclusion, and what is contradicted
CHANGES: dict[str, tuple[list[float], list[float], list[int], str]] = {
    "nothing": ([1.0, 2.0], [0.0, 0.0], [0, 0], ""),
    "one amount for one label": ([1.0, 2.0, 3.0], [0.5, 0.5, -2.0], [7, 7, 9], ""),
    "two amounts for one label": ([1.0, 2.0, 3.0], [0.5, 0.6, -2.0], [7, 7, 9], "one label"),
    "an amount for no label": ([1.0, 2.0, 3.0], [0.5, 0.5, 0.1], [7, 7, 0], "called unchanged"),
    "two labels and no amount": ([1.0, 2.0], [0.0, 0.0], [7, 9], ""),
    "rounding": ([1.0, 2.0], [0.5, 0.5 + 1e-14], [7, 7], ""),
    "minus infinity stays": ([-INFINITE, 2.0], [0.0, 0.5], [7, 7], ""),
    "a place that is masked": ([-1e38, 2.0], [0.0, 0.5], [7, 7], ""),
    "a place that is masked, and others": ([-1e38, 2.0, 3.0], [0.0, 0.5, 0.7], [7, 7, 7], "one label"),
    "no number stays none": ([NONE, 2.0], [0.0, 0.5], [7, 7], ""),
    "a number becomes NaN": ([1.0, 2.0], [NONE, 0.5], [7, 7], "becomes NaN"),
    "a number becomes infinite": ([1.0, 2.0], [INFINITE, 0.5], [7, 7], "becomes NaN or infinite"),
    "an infinite number, and others": ([INFINITE, 2.0, 3.0], [0.0, 0.5, 0.7], [7, 7, 7], "one label"),
    "an infinite number, and one that stays": ([INFINITE, 2.0, 3.0], [0.0, 0.5, 0.0], [7, 0, 7], "called unchanged"),
    "infinite numbers alone": ([INFINITE, -INFINITE], [0.0, 0.0], [7, 7], ""),
}


@dataclass
class Concluded:
    label: Tensor


@pytest.mark.parametrize(("before", "amounts", "labels", "fault"), CHANGES.values(), ids=list(CHANGES))
def test_numbers_that_change_otherwise_than_their_labels_say_are_named(
    before: list[float], amounts: list[float], labels: list[int], fault: str
) -> None:
    old, by = torch.tensor(before, dtype=torch.float64), torch.tensor(amounts, dtype=torch.float64)
    found = contradicts(old + by, old, Concluded(torch.tensor(labels)))
    assert (found is None) == (fault == "") and fault in (found or "")


def test_a_none_that_becomes_a_number_and_a_place_that_changes_are_named() -> None:
    none, number = (torch.tensor([first, 1.0], dtype=torch.float64) for first in (NONE, 0.0))
    assert contradicts(number, none, None) == "a result becomes NaN or infinite, or stops being so"
    assert contradicts(torch.tensor([1, 2]), torch.tensor([1, 3]), None) == "an integer result changes"
    assert contradicts(torch.tensor([1, 2]), torch.tensor([1, 2]), None) is None
    assert contradicts(number, number, None) is None
    assert contradicts(number + 1, number, None) == "an element called unchanged changes"


def test_rounding_of_a_large_number_is_no_change_of_its_own() -> None:
    old = torch.tensor([1e9, 1.0], dtype=torch.float64)
    assert contradicts(old + 0.3, old, Concluded(torch.tensor([5, 5]))) is None  # 1e9 + 0.3 is off by about 1e-8
    assert contradicts(old[1:] + 3e-9, old[1:], None) == "an element called unchanged changes"


def test_a_claim_that_takes_epsilon_for_zero_is_not_moved_along(claims: list[Any], point: Point) -> None:
    wrong = pick(claims, "DW009")
    wrong = replace(wrong, sites=wrong.sites[1:])
    assert fault(wrong, point) and not fault(replace(wrong, tier="epsilon"), point)


def test_a_proof_of_which_one_step_is_false_is_refused_whatever_its_motion(claims: list[Any], point: Point) -> None:
    claim = pick(claims, "DW003")
    shifted = [i for i, s in enumerate(claim.steps) if i and isinstance(s.value, Shift)]
    for i in shifted:
        value = claim.steps[i].value
        lie = replace(claim.steps[i], value=replace(value, label=torch.ones_like(value.label)))
        assert fault(replace(claim, steps=(*claim.steps[:i], lie, *claim.steps[i + 1 :])), point), i


class Fused(nn.Module):
    """Two blocks of attention whose queries, keys and values are written by one map; the scores are two differences."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = (nn.ModuleList(nn.Linear(4, n) for _ in range(2)) for n in (12, 4))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, output in zip(self.qkv, self.output, strict=True):
            q, k, v = qkv(x).chunk(3, -1)
            x = x + output(torch.softmax((q - q.roll(1, 0)) @ k.mT, -1) @ v).tanh()
        return x


@pytest.fixture(scope="module")
def fused() -> Graph:
    torch.manual_seed(0)
    return canonical(trace(Fused().double(), (torch.randn(2, 3, 4, dtype=torch.float64),)))


@pytest.fixture(scope="module")
def fused_claims(fused: Graph) -> list[Any]:
    return search(fused).claims


@pytest.fixture
def fused_point(fused: Graph) -> Point:
    values = {n: t.detach() for n, t in fused.tensors.items()}
    return Point(fused, values, {fused.inputs[0]: torch.randn(2, 3, 4, dtype=torch.float64)})


def test_honest_proofs_about_parts_of_two_blocks_pass(
    fused: Graph, fused_claims: list[Any], fused_point: Point
) -> None:
    assert len([c for c in fused_claims if c.code == "DW010"]) == 2
    replayed = replay(fused_claims, fused_point)
    assert structure(fused, fused_claims) == {} == replayed.faults == replayed.skipped


def unlabelled(claim: ShiftClaim, place: int) -> ShiftClaim:
    """The proof as it is kept of a value that is too large for its labels to be kept."""
    steps = [replace(s, value=True) if i == place else s for i, s in enumerate(claim.steps)]
    return replace(claim, steps=tuple(steps))


@pytest.mark.parametrize("code", ["DW002", "DW003"])
def test_steps_without_labels_and_what_reads_them_are_not_replayed_but_counted(
    graph: Graph, claims: list[Any], point: Point, code: str
) -> None:
    claim = pick(claims, code)
    shifted = [i for i, s in enumerate(claim.steps) if s.value is not None]
    for i in shifted:
        replayed = replay([unlabelled(claim, i)], point)
        later = [s for s in claim.steps[i + 1 :] if s.kind != "absorbed"]
        readers = [s for s in later if claim.steps[i].node in graph.nodes[s.node].inputs]
        assert replayed.faults == {}
        assert replayed.skipped == {0: len(readers) + (i > 0)}, claim.steps[i]


def test_a_false_step_behind_one_without_labels_is_refused(claims: list[Any], point: Point) -> None:
    claim = pick(claims, "DW003")
    shifted = [i for i, s in enumerate(claim.steps) if isinstance(s.value, Shift)]
    first, last = shifted[0], shifted[-1]
    value = claim.steps[last].value
    lie = replace(claim.steps[last], value=replace(value, label=torch.ones_like(value.label)))
    lied = replace(claim, steps=(*claim.steps[:last], lie, *claim.steps[last + 1 :]))
    assert fault(unlabelled(lied, first), point)


def test_a_shift_that_is_said_to_be_taken_over_and_goes_on_is_replayed(claims: list[Any], point: Point) -> None:
    claim = pick(claims, "DW002")
    steps = list(claim.steps)
    for i, step in enumerate(steps):
        if step.op == "aten.matmul":
            value = replace(step.value, label=torch.ones_like(step.value.label))
            steps[i] = replace(step, value=value, kind="absorbed")
    assert "one label" in fault(replace(claim, steps=tuple(steps)), point)


class Astray(ShiftClaim):
    """A claim whose motion also moves the bias of the queries, by as much as its note says."""

    def member(self, point: Point, generator: torch.Generator) -> dict[str, Tensor]:
        name = point.graph.node_of["query.bias"]
        return super().member(point, generator) | {name: point.values[name] + float(self.note)}


def test_motions_of_claims_that_move_one_parameter_add_up(claims: list[Any], point: Point) -> None:
    one, none = (replace(remade(pick(claims, "DW002"), Astray), note=note) for note in ("1.0", "0.0"))
    assert replay([none, none], point).faults == {}
    assert set(replay([one, none], point).faults) == {0}
    assert set(replay([none, one], point).faults) == {1}


def test_a_claim_that_does_not_fit_is_named_beside_one_that_is_false(claims: list[Any], point: Point) -> None:
    claim = pick(claims, "DW002")
    faults = replay([remade(claim, Misfit), replace(remade(claim, Astray), note="1.0")], point).faults
    assert "does not have the parameter's shape" in faults[0] and "changes the outputs" in faults[1]


class Ranked(nn.Module):
    """The largest of equally shifted numbers, less the same shift."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((x + self.bias).topk(2, dim=1)[0], 1)


def test_a_conclusion_about_some_of_several_results_is_refused() -> None:
    graph = canonical(trace(Ranked().double(), (x := torch.randn(2, 3, 4, dtype=torch.float64),)))
    claim = next(c for c in search(graph).claims if isinstance(c, ShiftClaim))
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: x})
    assert fault(claim, point) == ""
    place = next(i for i, s in enumerate(claim.steps) if s.op == "aten.topk")
    short = replace(claim.steps[place], value=claim.steps[place].value[:1])
    steps = (*claim.steps[:place], short, *claim.steps[place + 1 :])
    assert "2 results, and conclusions about 1" in fault(replace(claim, steps=steps), point)


class Stream(nn.Module):
    """What two maps write is normed and read: rotations are free, behind a LayerNorm only those that keep the mean."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.up, self.down, self.read = (
            nn.Linear(*n, bias=False) for n in ((4, 6), (6, 5), (5, 6), (6, 3))
        )
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return torch.tanh(self.read(self.norm(h + self.down(torch.sin(self.up(self.norm(h)))))))


@pytest.mark.parametrize(
    ("norm", "lie"),
    [
        (nn.RMSNorm(6, eps=1e-3, elementwise_affine=False), {"rotations": False}),
        (nn.LayerNorm(6, elementwise_affine=False), {"rotations": False}),
        (nn.LayerNorm(6, elementwise_affine=False), {"fixes_ones": False}),
    ],
)
def test_a_group_that_is_said_to_be_larger_is_refused(norm: nn.Module, lie: dict[str, bool]) -> None:
    graph = canonical(trace(Stream(norm).double(), (x := torch.randn(2, 3, 4, dtype=torch.float64),)))
    point = Point(graph, {n: t.detach() for n, t in graph.tensors.items()}, {graph.inputs[0]: x})
    claim = next(c for c in search(graph).claims if isinstance(c, TurnClaim) and not c.scalar)
    assert claim.rotations and fault(claim, point) == ""
    assert "changes the outputs" in fault(replace(claim, **lie), point)
