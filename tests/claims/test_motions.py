"""Every claim in three ways: its motions, a random direction and a finite member all leave the outputs as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.claims.action import Blockwise, blocks_at
from deadweight.claims.claim import Claim
from deadweight.claims.point import Known, Motion, Point, ancestors
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.proof.basis import Site

torch.set_num_threads(1)
SEED = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 4, generator=SEED, dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0]])
ANGLES = torch.tensor([[0.3, 0.1], [1.1, 0.4], [2.5, 0.7]], dtype=torch.float64)
STEP, FLAT = 1e-5, 1e-6  # differences over a step are of second order: 1e-10, with room to spare
STAYS = 1e-10  # of outputs of order one: float64 rounds at about 1e-16


class Lambda(nn.Module):
    def __init__(self, forward: Callable, parts: dict[str, Any]) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


def parts() -> dict[str, Any]:
    return {
        "q": linear(4, 4),
        "k": linear(4, 4),
        "up": nn.Linear(4, 5),
        "down": nn.Linear(5, 4),
        "read": linear(4, 4),
        "wide": linear(8, 3),
        "fused": nn.Linear(4, 12),
        "last": nn.Linear(4, 3),
        "norm": nn.LayerNorm(4, elementwise_affine=False),
        "affine": nn.LayerNorm(4),
        "gain": torch.rand(4, generator=SEED) + 0.5,
        "other": torch.rand(4, generator=SEED) + 0.5,
        "long": torch.randn(8, generator=SEED),
        "table": torch.randn(3, 4, generator=SEED),
        "matrix": torch.randn(4, 5, generator=SEED),
    }


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-3)


def rotated(h: Tensor) -> Tensor:
    a, b = h.chunk(2, -1)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1)


def fused_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.fused(x).chunk(3, -1)
    return torch.tanh(m.last(scores(rotated(q), rotated(k)) @ v))


def two_places(m: Any, x: Tensor) -> Tensor:
    """One parameter takes over what two maps make of the shift."""
    h = x + m.gain
    return torch.tanh(m.q(h) + m.long[:4]) * torch.tanh(m.k(h) + m.long[4:])


# (m, x, i) → outputs, and the laws whose claims are expected among others
CASES: dict[str, tuple[Callable, set[str]]] = {
    "heads with rotary positions": (lambda m, x, i: scores(rotated(m.q(x)), rotated(m.k(x))), {"DW009"}),
    "normed heads": (lambda m, x, i: scores(rms(m.q(x)), rms(m.k(x))), {"DW009"}),
    "normed heads with rotary positions": (
        lambda m, x, i: scores(rms(rotated(m.q(x))), rms(rotated(m.k(x)))),
        {"DW009"},
    ),
    "gains of heads": (lambda m, x, i: scores(rms(m.q(x)) * m.gain, rms(m.k(x)) * m.other), {"DW009"}),
    "gains of heads with rotary positions": (
        lambda m, x, i: scores(rotated(rms(m.q(x)) * m.gain), rotated(rms(m.k(x)) * m.other)),
        {"DW009"},
    ),
    "squared units": (lambda m, x, i: torch.tanh(m.down(m.up(x).relu().square())), {"DW011"}),
    "units": (lambda m, x, i: torch.tanh(m.down(m.up(x).relu())), {"DW011"}),
    "a basis without a norm": (lambda m, x, i: torch.tanh(m.k(m.q(x))), {"DW019"}),
    "a normed stream": (lambda m, x, i: torch.tanh(m.last(rms(m.q(x) + m.down(torch.tanh(m.up(rms(m.q(x)))))))), set()),
    "a centred stream": (lambda m, x, i: torch.tanh(m.last(m.norm(m.q(x)))), {"DW005"}),
    "a centred stream of tables": (lambda m, x, i: torch.tanh(m.last(m.norm(F.embedding(i, m.table)))), {"DW005"}),
    "a mean behind a scale for each channel": (lambda m, x, i: torch.tanh(m.last(m.norm(m.q(x) * m.gain))), {"DW005"}),
    "a mean of a bias behind a scale for each channel": (
        lambda m, x, i: torch.tanh(m.last(m.norm(x + m.down(torch.tanh(m.up(x))) * m.gain))),
        {"DW005"},
    ),
    "a scale before a norm": (
        lambda m, x, i: torch.tanh(m.read(F.layer_norm(m.q(x), (4,), eps=0.0))),
        {"DW014"},
    ),
    "a scale of a stream before a norm": (
        lambda m, x, i: torch.tanh(m.read(F.layer_norm((h := m.q(x)) + m.k(h), (4,), eps=0.0))),
        {"DW014"},
    ),
    "a gain of a stream before a norm": (
        lambda m, x, i: torch.tanh(m.read(F.layer_norm(rms(x) * (1 + m.gain), (4,), eps=0.0))),
        {"DW014"},
    ),
    "two copies of a space": (lambda m, x, i: torch.tanh(m.wide(torch.cat([h := -m.q(x), h], -1))), set()),
    "a part of a fused map": (lambda m, x, i: fused_attention(m, x), {"DW003", "DW009", "DW010"}),
    "a key bias": (lambda m, x, i: scores(m.q(x), m.up(x)[..., :4]), {"DW002"}),
    "a value bias": (lambda m, x, i: torch.tanh(m.down(scores(m.q(x), m.k(x)) @ m.up(x))), {"DW003"}),
    "two biases": (lambda m, x, i: torch.tanh(x + m.gain + m.other), {"DW017"}),
    "two biases of two sums": (
        lambda m, x, i: torch.tanh(x + m.gain + m.other) * torch.sin(x + m.other + m.gain),
        {"DW017"},
    ),
    "a bias and a part for each of two maps": (lambda m, x, i: two_places(m, x), {"DW017"}),
    "a direction that a norm lost": (lambda m, x, i: torch.tanh(m.last(m.affine(x))), {"DW006", "DW008"}),
    "a direction that a norm lost, of columns": (lambda m, x, i: torch.tanh(m.affine(x) @ m.matrix), {"DW006"}),
    "a direction that a norm lost, of columns, and a bias": (
        lambda m, x, i: torch.tanh(m.down(torch.tanh(m.affine(x) @ m.matrix + m.long[:5]))),
        {"DW008"},
    ),
    "a shift behind a norm that weights take over": (
        lambda m, x, i: torch.tanh(m.q(m.affine(x))) + scores(m.q(x), m.k(x)).sum(-1, keepdim=True),
        set(),
    ),
    "a table beside a bias": (lambda m, x, i: torch.tanh(F.embedding(i, m.table) + m.gain), {"DW017"}),
    "a chain": (lambda m, x, i: torch.tanh(m.down(m.up(x))), {"DW019"}),
}


def point_of(forward: Callable) -> Point:
    torch.manual_seed(0)
    inputs = (X, TOKENS)
    graph = canonical(trace(Lambda(forward, parts()).double(), inputs))
    values = {n: torch.rand_like(t) + 0.3 if n in graph.parameters else t.detach() for n, t in graph.tensors.items()}
    return Point(graph, values, dict(zip(graph.inputs, inputs, strict=True)))


def moved(point: Point, motion: Motion, step: float) -> list[Tensor]:
    return point.at({n: point.values[n] + step * t for n, t in motion.items()}).outputs


def slope(point: Point, motion: Motion) -> float:
    up, down = (moved(point, motion, sign * STEP) for sign in (1, -1))
    return max(float((a - b).abs().max()) for a, b in zip(up, down, strict=True)) / (2 * STEP)


def assert_true(point: Point, claim: Claim) -> None:
    named = claim.code, point.graph.parameters[claim.node]
    motions = list(claim.motions(point))
    direction = claim.direction(point, torch.Generator().manual_seed(1))
    for motion in (*motions, direction):
        assert any(bool(t.any()) for t in motion.values()), named
        assert all(t.shape == point.values[n].shape for n, t in motion.items()), named
        assert slope(point, motion) < FLAT, named
    assert rank([*motions, direction]) == rank(motions) >= claim.dof, named
    member = claim.member(point, torch.Generator().manual_seed(1))
    outputs = point.at(member).outputs
    assert any(not torch.equal(t, point.values[n]) for n, t in member.items()), named
    assert max(float((a - b).abs().max()) for a, b in zip(outputs, point.outputs, strict=True)) < STAYS, named


def rank(motions: list[Motion]) -> int:
    names = sorted({n for motion in motions for n in motion})
    shapes = {n: t.shape for motion in motions for n, t in motion.items()}
    zero = {n: torch.zeros(shapes[n], dtype=torch.float64) for n in names}
    rows = [torch.cat([motion.get(n, zero[n]).reshape(-1) for n in names]) for motion in motions]
    return int(torch.linalg.matrix_rank(torch.stack(rows), rtol=1e-9))


@pytest.mark.parametrize(("forward", "laws"), CASES.values(), ids=list(CASES))
def test_a_claim_holds_for_its_motions_a_direction_and_a_member(forward: Callable, laws: set[str]) -> None:
    point = point_of(forward)
    claims = [c for c in search(point.graph).claims if c.code != "DW001" and c.epsilon == 0]
    assert {c.code for c in claims} >= laws
    for claim in claims:
        assert_true(point, claim)


def test_a_power_of_more_than_a_scale_is_none() -> None:
    pair = Blockwise.dense(torch.tensor([[1, 2]]), torch.eye(2, dtype=torch.float64)[None])
    with pytest.raises(AssertionError, match="more than a scale"):
        pair.raised(2, finite=True)
    three = Blockwise.dense(torch.tensor([[1]]), torch.full((1, 1, 1), 2.0, dtype=torch.float64))
    assert (
        float(three.raised(2, finite=True).diagonal) == 3.0**2 - 1
        and float(three.raised(2, finite=False).diagonal) == 4
    )


def test_a_block_of_which_a_parameter_has_a_part_cannot_act_on_it() -> None:
    index = torch.tensor([[1, 2], [3, 4]])
    site = Site("p", "out", 0, torch.tensor([3, 1, 2, 4, 0]))
    (places, blocks), *rest = blocks_at(site, index)
    assert not rest and places.tolist() == [[1, 2], [0, 3]] and blocks.tolist() == [0, 1]
    with pytest.raises(AssertionError, match="torn"):
        list(blocks_at(replace(site, coordinate=torch.tensor([3, 1, 2])), index))
    with pytest.raises(AssertionError):
        list(blocks_at(replace(site, coordinate=torch.tensor([[1, 2]])), index))


def test_a_value_that_is_given_is_not_computed() -> None:
    point = point_of(lambda m, x, i: torch.tanh(m.q(x)) + 0 * i.sum())
    graph: Graph = point.graph
    linear = next(n.name for n in graph.nodes.values() if n.op == "linear")
    after = next(n.name for n in graph.nodes.values() if n.op == "aten.tanh")
    nothing = torch.zeros(graph.nodes[linear].shape, dtype=torch.float64)
    assert ancestors(graph, after, {linear: nothing}) == [after]
    assert not bool(point.value(after, {linear: nothing}).any()) and bool(point.value(after).any())


def test_what_is_drawn_at_random_is_drawn_alike_each_time() -> None:
    point = point_of(lambda m, x, i: torch.tanh(F.dropout(m.q(x), 0.5, True)) + 0 * i.sum())
    dropout, linear = (next(n for n in point.graph.nodes.values() if n.op == op) for op in ("aten.dropout", "linear"))
    known = Known(point)
    drawn = known[dropout.name]
    assert torch.equal(drawn, point.nodes[dropout.name]) and torch.equal(known[linear.name], point.nodes[linear.name])


def test_a_point_that_was_moved_twice_differs_in_both_places() -> None:
    point = point_of(lambda m, x, i: torch.tanh(m.q(x)) * torch.sin(m.k(x)) + 0 * i.sum())
    q, k = (point.graph.node_of[name] for name in ("q.weight", "k.weight"))
    nothing = {name: torch.zeros_like(point.values[name]) for name in (q, k)}
    assert bool(point.nodes[point.graph.outputs[0]].any())  # all values are known: what does not move is not computed
    assert not bool(point.at({q: nothing[q]}).outputs[0].any()) and not bool(point.at({k: nothing[k]}).outputs[0].any())
    twice = point.at({q: nothing[q]}).at({k: point.values[k] * 2})
    assert twice.moved == {q, k} and not bool(twice.outputs[0].any())


def test_elements_move_by_themselves_where_no_two_share_a_group() -> None:
    point = point_of(lambda m, x, i: scores(m.q(x), m.up(x)[..., :4]))
    claim = next(c for c in search(point.graph).claims if c.code == "DW002" and isinstance(c, ShiftClaim))
    groups = {"apart": [1, 2, 0, 3, 4], "together": [1, 1, 0, 3, 4]}
    moves = {name: element_wise(replace(claim, groups=torch.tensor(numbers))) for name, numbers in groups.items()}
    assert moves == {"apart": True, "together": False}
