"""Every shift rule against numbers: equal labels are equal shifts, label 0 is none, across the whole graph.

A rule has a case that it must pass soundly and one at which the proof must stop; a rule without them fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.graph.evaluate import evaluate
from deadweight.graph.node import Graph
from deadweight.proof.shift import RULES, Outcome, Shift
from deadweight.search.prover import Prover

CLOSE = 1e-9  # of numbers of order one: one operation in float64 rounds at about 1e-15
ROWS = torch.arange(1, 7).reshape(6, 1).expand(6, 4)
X = torch.randn(2, 3, 4, dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 5], [2, 2, 3]])
Y = torch.randn(2, 4, 6, dtype=torch.float64)


def soft(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def b(size: int = 4) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def case(
    forward: Callable, *inputs: Tensor, p: Tensor | None = None, groups: Tensor | None = None, **parts: Any
) -> dict:
    """`forward(m, *inputs)` with the shifted parameter m.p; by default its elements move one by one."""
    p = b() if p is None else p
    groups = torch.arange(1, p.numel() + 1).reshape(p.shape) if groups is None else groups
    return {"forward": forward, "inputs": inputs or (X,), "p": p, "groups": groups, **parts}


ONES = torch.ones(4, dtype=torch.int64)
TABLE = torch.randn(6, 4, dtype=torch.float64)
ABOVE = torch.arange(1, 17).reshape(4, 4).triu(1)  # the elements above the diagonal of a square matrix
KERNEL = torch.randn(4, 4, 3, dtype=torch.float64)
ALIKE = torch.arange(1, 13).reshape(1, 4, 3).expand(4, 4, 3)
CHANNELS = (1, 4, 1)
REPEATS = torch.tensor([1, 2, 1])
SQUARE = torch.randn(4, 4, dtype=torch.float64)  # no batch axis: four channels of four places


def packed(x: Tensor) -> Tensor:
    """The rows of two sequences of different lengths, one below the other."""
    return nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True).data


def beside(m: Any, x: Tensor) -> Tensor:
    """Three rows that are not shifted, and three that are."""
    return torch.cat([x, x + m.p], 1)


def alike(places: Tensor) -> Tensor:
    """The same place for all channels."""
    return places.unsqueeze(-1).expand(2, 3, 4)


def twice(y: Tensor, alpha: float) -> Tensor:
    return torch.add(y, y, alpha=alpha)


def doubled(y: Tensor, times: int) -> Tensor:
    for _ in range(times):
        y = y + y
    return y


MATRICES = torch.randn(3, 5, 4)


def chosen(x: Tensor, matrices: Tensor, by: Tensor) -> Tensor:
    """Every row times the matrix of an expert that the first number of another row names."""
    rows = x.flatten(0, 1)
    index = (by.flatten(0, 1)[:, 0] > 0).to(torch.int64)
    return torch.matmul(matrices[index], rows.unsqueeze(-1)).squeeze(-1)


SOUND: dict[str, list[dict]] = {
    "shape": [
        case(lambda m, x: (x + m.p).transpose(1, 2).reshape(2, 12).flip(0).roll(1, 1)),
        case(lambda m, x: torch.cat([x + m.p, x], 1).unflatten(-1, (2, 2)).repeat_interleave(2, 2)),
        case(lambda m, x: torch.stack((x + m.p).chunk(2, -1)).permute(1, 0, 3, 2).unbind(1)),
        case(lambda m, x: (x + m.p).repeat_interleave(m.repeats, 1, output_size=4), repeats=nn.Buffer(REPEATS)),
        case(lambda m, x, r: (x + m.p).repeat_interleave(r, 1, output_size=4), X, REPEATS),
        case(lambda m, x: (x + m.p).expand_as(x * x) + x.view_as(x + m.p)),
    ],
    "index": [
        case(lambda m, x, i: (x + m.p)[:, i % 3], X, TOKENS),
        case(lambda m, x, i: (x + m.p)[..., i % 4], X, TOKENS),
        case(lambda m, x, i: torch.gather(x + m.p, -1, i.unsqueeze(-1) % 4), X, TOKENS),
        case(lambda m, x: (x + m.p)[:, torch.tensor([2, 0])]),
        case(lambda m, x, i: torch.gather(beside(m, x), 1, alike(i)), X, TOKENS),
        case(lambda m, x, i: torch.gather(beside(m, x), 1, alike(i)[:1, :2]), X, TOKENS),
        case(lambda m, x, i: torch.gather(beside(m, x), 1, (alike(i) + torch.arange(4)) % 6), X, TOKENS),
        case(lambda m, x, i: torch.gather(x + m.p, 1, alike(i) % 3), X, TOKENS),
        case(lambda m, x, i: beside(m, x).index_select(1, i[0]), X, TOKENS),
        case(lambda m, x, i: (x + m.p).index_select(1, i[0] % 3), X, TOKENS),
        case(lambda m, x, i: (x + m.p).index_select(2, i[0] % 4), X, TOKENS),
    ],
    "linear_unknown": [
        case(lambda m, x: torch.cumsum(x + m.p, -1)),
        case(lambda m, x, i: (x + m.p).scatter(1, i.unsqueeze(-1) % 3, 1.0), X, TOKENS),
    ],
    "addition": [
        case(lambda m, x: (x + m.p) + (x * x + m.p) - m.p),
        case(lambda m, x: torch.sub(x + m.p, x * x + m.p, alpha=2)),
        case(lambda m, x: torch.add(x + m.p, x + m.p, alpha=3) - (x + m.p)),
        case(lambda m, x: twice(x + m.p, 2) - twice(torch.sin(x) + m.p, 3)),
        case(lambda m, x: twice(x + m.p, 0.5) - (torch.sin(x) + m.p) * 1.5),
        case(lambda m, x: (x + m.p) - (torch.tanh(x) + m.p)),
    ],
    "negation": [case(lambda m, x: -(x + m.p) + (torch.tanh(x) + m.p))],
    "product": [
        case(lambda m, x: 2.0 * (x + m.p) * torch.tanh(x)),
        case(lambda m, x: (x + m.p) * (torch.tanh(x) + m.p)),
        case(lambda m, x: (x + m.p) * x.mean(-1, keepdim=True)),
    ],
    "quotient": [case(lambda m, x: (x + m.p) / 3.0 / (1 + x * x))],
    "linear": [
        case(lambda m, x: F.linear(x + m.p, m.w), w=torch.randn(5, 4)),
        case(lambda m, x: F.linear(x + m.p, m.w) - F.linear(torch.tanh(x) + m.p, m.w), w=torch.randn(5, 4)),
        case(lambda m, x: F.linear(x, m.p), p=TABLE, groups=torch.arange(1, 5).expand(6, 4)),
        case(lambda m, x: F.linear(x, m.p), p=TABLE, groups=ROWS),
    ],
    "experts": [
        case(lambda m, x: chosen(x + m.p, m.w, x), w=MATRICES),
        case(lambda m, x: chosen(x, m.p, x), p=MATRICES, groups=torch.arange(1, 5).expand(3, 5, 4)),
        case(lambda m, x: chosen(x, m.p, x), p=MATRICES, groups=torch.arange(1, 61).reshape(3, 5, 4)),
        case(lambda m, x: torch.bmm((x.flatten(0, 1) + m.p).expand(3, -1, -1), m.w), w=MATRICES.mT),
    ],
    "convolution": [
        case(lambda m, y: F.conv1d(y, m.p), Y, p=KERNEL, groups=ALIKE),
        case(lambda m, y: F.conv1d(y + m.p.view(CHANNELS), m.w), Y, w=KERNEL),
        case(lambda m, y: F.conv1d(y + m.p.view(CHANNELS), m.w, padding=1), Y, w=KERNEL),
        case(lambda m, y: F.conv1d(y + m.p.view(CHANNELS), m.w, padding="same"), Y, w=KERNEL),
        case(lambda m, y: F.conv1d(y + m.p.view(CHANNELS), m.w, stride=2, groups=2), Y, w=KERNEL[:, :2]),
        case(lambda m, y: F.conv1d(y * m.p.view(CHANNELS), m.w, stride=2), Y, w=KERNEL[..., :1]),
        case(lambda m, y: F.conv1d(y + m.p, m.w, stride=2, groups=4), Y, w=KERNEL[:, :1, :1], p=b(6)),
        case(lambda m, y: F.conv1d(y + m.p, m.w), Y, w=KERNEL, p=b(6)),
        case(lambda m, y: F.conv1d(y, m.p, groups=2), Y, p=KERNEL[:, :2], groups=ALIKE[:, :2]),
    ],
    "embedding": [
        case(lambda m, i: F.embedding(i, m.p), TOKENS, p=TABLE, groups=ROWS),
        case(lambda m, i: F.embedding(i, m.p), TOKENS, p=TABLE, groups=torch.arange(1, 5).expand(6, 4)),
        case(lambda m, i: F.embedding(i, m.p), TOKENS, p=TABLE),
    ],
    "matmul": [
        case(lambda m, x: soft(x @ x.transpose(1, 2)) @ (x + m.p)),
        case(lambda m, x: x @ (torch.tanh(x) + m.p).transpose(1, 2)),
        case(lambda m, x: (x + m.p) @ (torch.tanh(x) + m.p).transpose(1, 2)),
    ],
    "softmax": [
        case(lambda m, x: soft(x @ (torch.tanh(x) + m.p).transpose(1, 2)) @ x),
        case(lambda m, x: torch.log_softmax(x + m.p, 1)),
    ],
    "layer_core": [case(lambda m, x: F.layer_norm(x + m.p, (4,)), groups=ONES)],
    "instance_core": [case(lambda m, y: F.instance_norm(y + m.p.view(CHANNELS)), Y)],
    "batch_core": [case(lambda m, y: F.batch_norm(y + m.p.view(CHANNELS), None, None, training=True), Y)],
    "group_core": [
        case(lambda m, y: F.group_norm(y + m.p.view(CHANNELS), 2), Y, groups=torch.tensor([1, 1, 2, 2])),
    ],
    "rms_core": [case(lambda m, x: F.rms_norm(x + m.p, (4,)), groups=ONES)],
    "mean": [
        case(lambda m, x: (x + m.p).mean(1) + (x + m.p).mean((0, 1))),
        case(lambda m, x: (x + m.p).amax(1) - torch.logsumexp(x + m.p, 1)),
        case(lambda m, x: (x + m.p).mean(-1) - (x[..., :2] + m.p[:2]).mean(-1)),
    ],
    "total": [case(lambda m, x: (x + m.p).sum(-1) - (torch.tanh(x) + m.p).sum(-1))],
    "variance": [
        case(lambda m, x: torch.var(x + m.p, -1, correction=0) * torch.std(x + m.p, (1, 2)).view(2, 1), groups=ONES),
        case(lambda m, x: (x + m.p).var(unbiased=False), groups=ONES),
    ],
    "triangle": [
        case(lambda m, x: (x + m.p).tril()),
        case(lambda m, x: x @ m.p.tril(), p=TABLE[:4].clone(), groups=ABOVE),
        case(lambda m, x: x @ m.p.triu(-1), p=TABLE[:4].clone(), groups=ABOVE.T.tril(-2)),
    ],
    "masked": [
        case(lambda m, x: soft((x @ (x + m.p).transpose(1, 2)).masked_fill(x[..., :3] > 0, -torch.inf))),
        case(lambda m, x: torch.where(x > 0, x + m.p, torch.tanh(x) + m.p)),
        case(lambda m, x: torch.where(x > 0, x + m.p, x)),
    ],
    "dropout": [case(lambda m, x: F.dropout(x + m.p, 0.4, True), training=True)],
    "ranking": [
        case(lambda m, x: torch.topk((x + m.p).transpose(1, 2), 2)[0]),
        case(lambda m, x: torch.sort(x + m.p, dim=1)[0]),
    ],
    "padding": [
        case(lambda m, x: F.pad(x + m.p, (1, 2), value=3.0)),
    ],
    "pointwise": [case(lambda m, x: torch.tanh(x + m.p), groups=ONES)],
    "packing": [
        case(lambda m, x: packed(x + m.p)),
        case(lambda m, x: soft(packed(x + m.p)), groups=ONES),
        case(lambda m, x: packed(x + m.p[:3, None]), groups=ONES),
    ],
}
SOUND["dropout"] += [
    case(lambda m, x: torch.native_dropout(x + m.p, 0.4, True)[0], training=True),
    case(lambda m, y: F.dropout1d(y + m.p.view(CHANNELS), 0.4, True), Y, training=True),
]
SOUND["comparison"] = [
    case(lambda m, x: ((h := x + m.p) < h.mean(1, keepdim=True)) * x),
    case(lambda m, x: (x + m.p >= torch.sin(x) + m.p).to(x.dtype)),
]
SOUND["extreme"] = [
    case(lambda m, x: (x + m.p).max(1)[0] - (torch.sin(x) + m.p).min(1, keepdim=True)[0]),
    case(lambda m, x: x.gather(1, (x + m.p).max(1, keepdim=True)[1])),
]
SOUND["differences"] = [
    case(lambda m, x: torch.diff(x + m.p, n=2, dim=1) * torch.diff(x + m.p[:1], dim=2)[..., :1].sum(1, True))
]
SOUND["distance"] = [
    case(lambda m, x: torch.cdist(x + m.p, torch.sin(x) + m.p)),
    case(lambda m, x: F.pairwise_distance(x + m.p, torch.sin(x) + m.p)),
    case(lambda m, x: torch.cdist(x + m.p, (torch.sin(x) + m.p)[:, :1], p=1.0)),
]
BLOCKS = {"reaches_output", "recurrent"}  # no shift passes: there is nothing to be sound about

SILENT: dict[str, list[dict]] = {
    "shape": [
        case(lambda m, x: soft(torch.cat([x + m.p, x], -1)), groups=ONES),
        case(lambda m, x, r: soft((x + m.p).repeat_interleave(r, 2, output_size=4)), X, torch.tensor([1, 0, 2, 1])),
    ],
    "index": [
        case(lambda m, x, i: soft((x + m.p)[..., i[0] % 4]), X, TOKENS),
        case(lambda m, x, i: soft((x + m.p).index_select(2, i[0] % 4)), X, TOKENS),
        case(lambda m, x, i: soft(torch.gather(beside(m, x), 1, alike(i)).mT), X, TOKENS, groups=ONES),
        case(lambda m, x, i: soft(torch.gather(beside(m, x), 1, alike(i) + torch.arange(4) % 2)), X, TOKENS % 4),
    ],
    "linear_unknown": [case(lambda m, x: soft(torch.cumsum(x + m.p, -1)), groups=ONES)],
    "addition": [
        case(lambda m, x: soft(x + m.p)),
        case(lambda m, x: torch.add(x + m.p, x + m.p, alpha=-2)),
        case(lambda m, x: twice(x + m.p, 2) - 2 * (x + m.p)),
        case(lambda m, x: twice(x + m.p, 2) - twice(torch.sin(x) + m.p, 1)),
        case(lambda m, x: doubled(x + m.p, 64)),
    ],
    "negation": [case(lambda m, x: -(x + m.p))],
    "product": [case(lambda m, x: soft((x + m.p) * torch.tanh(x)), groups=ONES)],
    "quotient": [case(lambda m, x: x / (x + m.p)), case(lambda m, x: soft((x + m.p) / x), groups=ONES)],
    "linear": [case(lambda m, x: soft(F.linear(x + m.p, m.w)), w=torch.randn(5, 4))],
    "experts": [
        case(lambda m, x: soft(chosen(x + m.p, m.w, x)), w=MATRICES),
        case(lambda m, x: torch.softmax(chosen(x, m.p, x), 0), p=MATRICES, groups=torch.arange(1, 5).expand(3, 5, 4)),
    ],
    "convolution": [
        case(lambda m, y: torch.softmax(F.conv1d(y, m.p), -1), Y, p=KERNEL),
        case(lambda m, y: torch.softmax(F.conv1d(y + m.p.view(CHANNELS), m.w, padding=1), -1), Y, w=KERNEL),
        case(lambda m, y: torch.softmax(F.conv1d(y + m.p.view(CHANNELS), m.w), 1), Y, w=KERNEL),
        case(lambda m, y: torch.softmax(F.conv1d(y + m.p, m.w), -1), Y, w=KERNEL, p=b(6)),
        case(lambda m, y: torch.softmax(F.conv1d(y, m.p), 1), SQUARE, p=KERNEL[..., :1], groups=ALIKE[..., :1]),
    ],
    "embedding": [case(lambda m, i: soft(F.embedding(i, m.p)), TOKENS, p=TABLE)],
    "matmul": [
        case(lambda m, x: torch.softmax(torch.sigmoid(x @ x.transpose(1, 2)) @ (x + m.p), 1)),
        case(lambda m, x: torch.softmax((x + m.p) @ (torch.tanh(x) + m.p).transpose(1, 2), -1)),
    ],
    "softmax": [case(lambda m, x: soft(x + m.p)), case(lambda m, x: torch.softmax(x + m.p, 1) + m.p)],
    "layer_core": [case(lambda m, x: F.layer_norm(x + m.p, (4,)))],
    "instance_core": [case(lambda m, y: F.instance_norm(y + m.p), Y, p=b(6))],
    "batch_core": [
        case(lambda m, y: F.batch_norm(y + m.p, None, None, training=True), Y, p=b(6)),
        case(lambda m, y: F.batch_norm(y + m.p.view(2, 1, 1), None, None, training=True), Y, p=b(2)),
    ],
    "group_core": [case(lambda m, y: F.group_norm(y + m.p.view(CHANNELS), 2), Y)],
    "rms_core": [case(lambda m, x: F.rms_norm(x + m.p, (4,)), groups=ONES)],
    "mean": [case(lambda m, x: (x + m.p).amax(-1)), case(lambda m, x: soft(x - (x + m.p).mean((0, 1))))],
    "total": [case(lambda m, x: soft(x[:, 0] - (x + m.p).sum(1)))],
    "variance": [case(lambda m, x: torch.var(x + m.p, -1))],
    "triangle": [case(lambda m, x: x @ m.p.triu(), p=TABLE[:4].clone(), groups=ABOVE)],
    "masked": [
        case(lambda m, x: soft((x + m.p).masked_fill(x > 0, 0.0)), groups=ONES),
        case(lambda m, x: soft((x + m.p).masked_fill(x > 0, -9.0)), groups=ONES),
        case(lambda m, x: F.layer_norm((x + m.p).masked_fill(x > 0, -1e9), (4,)), groups=ONES),
        case(lambda m, x: torch.log_softmax((x + m.p).masked_fill(x > 0, -1e9), -1), groups=ONES),
        case(lambda m, x: torch.where(x > 0, x + m.p, -torch.inf)),
        case(lambda m, x: torch.softmax(torch.where(x > 0, torch.tensor([-torch.inf, 0.0, -9.0, 1.0]), x + m.p), 1)),
    ],
    "dropout": [case(lambda m, x: soft(F.dropout(x + m.p, 0.4, True)), groups=ONES, training=True)],
    "ranking": [case(lambda m, x: torch.topk(x + m.p, 2)[1])],
    "comparison": [
        case(lambda m, x: x + m.p > 0),
        case(lambda m, x: (x + m.p > x) * x),
        case(lambda m, x: (x + m.p).le((x + m.p).mean(-1, keepdim=True)) * x),
    ],
    "extreme": [
        case(lambda m, x: (x + m.p).max(-1)[1]),
        case(lambda m, x: torch.max(x + m.p, x)),
        case(lambda m, x: (x + m.p).max()),
        case(lambda m, x: soft((x + m.p).max(1)[0])),
    ],
    "differences": [
        case(lambda m, x: torch.diff(x + m.p)),
        case(lambda m, x: torch.diff(x + m.p, dim=1, prepend=x[:, :1])),
    ],
    "distance": [
        case(lambda m, x: torch.cdist(x + m.p, x)),
        case(lambda m, x: torch.cdist(x + m.p.view(4, 1)[:3], x + m.p.view(4, 1)[:3])),
        case(lambda m, x: F.pairwise_distance(x + m.p, torch.sin(x) - m.p)),
    ],
    "padding": [case(lambda m, x: soft(F.pad(x + m.p, (1, 2))), groups=ONES)],
    "pointwise": [case(lambda m, x: soft(F.gelu(x + m.p)))],
    "packing": [case(lambda m, x: soft(packed(x + m.p))), case(lambda m, x: soft(packed(x + m.p[:3, None])))],
    "recurrent": [
        case(lambda m, x: m.rnn(x + m.p)[0], rnn=nn.GRU(4, 3), groups=ONES),
        case(lambda m, x: m.rnn(x, m.p.expand(1, 3, 4))[0], rnn=nn.RNN(4, 4)),
        case(lambda m, x: m.rnn(x, (m.p.expand(1, 3, 4), m.p.expand(1, 3, 4)))[0], rnn=nn.LSTM(4, 4)),
    ],
    "reaches_output": [
        case(lambda m, x: (torch.softmax(x + m.p, 1), m.p)),
        case(lambda m, x: (torch.softmax(h := x + m.p, 1), h)),
    ],
}

UNSOUND: dict[str, tuple[str, dict]] = {
    "division that rounds": ("quotient", case(lambda m, x: torch.div(x + m.p, 0.5, rounding_mode="floor"))),
    "a stable sort along another axis": (
        "ranking",
        case(lambda m, x: torch.sort(x + m.p.view(3, 1), stable=True, dim=1)[0], p=b(3)),
    ),
    "a mean over no named axis": ("mean", case(lambda m, x: (x[0, :1] + m.p).mean(dim=[]))),
    "padding by repetition": ("padding", case(lambda m, y: F.pad(y + m.p.view(CHANNELS), (1, 2), mode="replicate"), Y)),
    "sums over different lengths": (
        "total",
        case(lambda m, x: x.sum() + m.p.expand(6, 4).sum(0) - m.p.expand(3, 4).sum(0)),
    ),
    "one number repeated, and once among zeros": (
        "linear",
        case(
            lambda m, x: m.w.sum() * x + F.linear(m.p.expand(4), m.w) - F.linear(F.pad(m.p, (0, 3)), m.w),
            p=b(1),
            w=TABLE[:4],
        ),
    ),
}


def rows(table: dict[str, list[dict]]) -> list[Any]:
    return [pytest.param(name, e, id=f"{name}-{i}") for name, cases in table.items() for i, e in enumerate(cases)]


def test_every_rule_has_a_sound_and_a_silent_case() -> None:
    rules = {rule.__name__ for rule in RULES.values()}
    assert rules == set(SOUND) | BLOCKS == set(SILENT)


@pytest.mark.parametrize(("name", "entry"), rows(SOUND))
def test_labels_tell_the_truth(traced: Callable, name: str, entry: dict) -> None:
    assert_truthful(traced, name, entry)


@pytest.mark.parametrize(("name", "entry"), UNSOUND.values(), ids=list(UNSOUND))
def test_labels_tell_the_truth_in_odd_corners(traced: Callable, name: str, entry: dict) -> None:
    assert_truthful(traced, name, entry)


@pytest.mark.parametrize(("name", "entry"), rows(SILENT))
def test_a_live_shift_is_not_called_dead(traced: Callable, name: str, entry: dict) -> None:
    _, outcome = walked(traced, entry)
    assert outcome.blocked is not None
    applied = {RULES[s.op].__name__ for s in outcome.steps if s.op in RULES} | {rule_of(outcome)}
    assert name in applied


def rule_of(outcome: Outcome) -> str:
    assert outcome.blocked is not None
    return RULES[outcome.blocked.op].__name__ if outcome.blocked.op in RULES else outcome.blocked.op


def walked(traced: Callable, entry: dict) -> tuple[Graph, Outcome]:
    entry = dict(entry)
    groups = entry.pop("groups")
    graph = traced(entry.pop("forward"), entry.pop("inputs"), **entry)
    return graph, Prover(graph).walk(graph.node_of["p"], groups)


def assert_truthful(traced: Callable, name: str, entry: dict) -> None:
    graph, outcome = walked(traced, entry)
    steps = {s.node: s for s in outcome.steps}
    used = {RULES[s.op].__name__ for s in outcome.steps if s.op in RULES}
    assert name in used or (outcome.blocked is not None and rule_of(outcome) == name)
    stopped = outcome.blocked.node if outcome.blocked is not None and outcome.blocked.op != "output" else None
    for seed in range(3):
        before, after = both(graph, entry, seed)
        amounts: dict[int, float] = {0: 0.0}
        for node in graph.nodes.values():
            if node.name == stopped:
                break
            value = steps[node.name].value if node.name in steps else None
            agree(before[node.name], after[node.name], value, amounts, node.name)


def both(graph: Graph, entry: dict, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """All values of the graph before and after the shift, for one draw of everything."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    values = {n: draw(t) if t.is_floating_point() else t for n, t in graph.tensors.items()}
    inputs = {n: draw(t) if t.is_floating_point() else t for n, t in zip(graph.inputs, entry["inputs"], strict=True)}
    groups = entry["groups"]
    amounts = torch.randn(int(groups.max()) + 1, generator=generator, dtype=torch.float64)
    amounts[0] = 0.0
    source = graph.node_of["p"]
    moved = {**values, source: values[source] + amounts[groups]}
    return everything(graph, values, inputs), everything(graph, moved, inputs)


def everything(graph: Graph, values: dict, inputs: dict) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def watch(node: Any, value: Any) -> Any:
        found[node.name] = value
        return value

    torch.manual_seed(5)  # dropout draws the same mask before and after
    evaluate(graph, values, inputs, watch)
    return found


def agree(before: Any, after: Any, value: Any, amounts: dict[int, float], name: str) -> None:
    if isinstance(before, (list, tuple)):
        values = value if isinstance(value, list) else [value] * len(before)
        for parts in zip(before, after, values, strict=True):
            agree(*parts, amounts, name)
        return
    if not before.is_floating_point():
        assert torch.equal(before, after), name
        return
    labels = (
        value.label.expand(before.shape) if isinstance(value, Shift) else torch.zeros(before.shape, dtype=torch.int64)
    )
    moved = after - before
    for label, amount in zip(labels.reshape(-1).tolist(), moved.reshape(-1).tolist(), strict=True):
        if amount == amount:  # −∞ stays −∞: the difference is no number, and any label is true
            known = amounts.setdefault(label, amount)
            assert abs(known - amount) < CLOSE * (1 + abs(known)), (name, label, known, amount)


def test_a_sum_that_weighs_one_value_twice_with_opposite_signs_is_not_shifted(traced: Callable) -> None:
    graph = traced(lambda m, x: torch.tanh(x) + twice(x + m.p, -1), (X,), p=b())
    assert Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved
    graph = traced(lambda m, x: torch.tanh(x) + twice(x + m.p, -2), (X,), p=b())
    assert not Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved


def test_a_prelu_with_one_slope_per_channel_can_be_a_factor(traced: Callable) -> None:
    def forward(m: Any, y: Tensor) -> Tensor:
        return (torch.sin(y) + m.p.view(CHANNELS)) * F.prelu(y, m.slope)

    graph = traced(forward, (Y,), p=b(), slope=b())
    assert not Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved


def test_an_operation_without_a_rule_blocks(traced: Callable) -> None:
    graph = traced(lambda m, x: torch.special.bessel_j0(x + m.p), (X,), p=b())
    outcome = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5))
    assert outcome.blocked is not None and outcome.blocked.op == "aten.special_bessel_j0"
    assert "no rule" in outcome.blocked.why


def test_repeats_that_are_constant_are_followed_and_repeats_that_are_data_block(traced: Callable) -> None:
    repeat = lambda m, x, r: torch.softmax((x + m.p).repeat_interleave(r, 1, output_size=4), 1)  # noqa: E731
    graph = traced(lambda m, x: repeat(m, x, m.repeats), (X,), p=b(), repeats=nn.Buffer(REPEATS))
    assert Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved
    graph = traced(repeat, (X, REPEATS), p=b())
    blocked = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).blocked
    assert blocked is not None and blocked.op == "aten.repeat_interleave" and "data decides" in blocked.why


def test_a_place_that_data_chooses_is_not_the_first_place(traced: Callable) -> None:
    graph = traced(lambda m, x, i: (x + m.p.view(3, 1))[:, i[0, 0].item()], (X, TOKENS), p=b(3))
    blocked = Prover(graph).walk(graph.node_of["p"], torch.tensor([0, 1, 2])).blocked
    assert blocked is not None and "data decides" in blocked.why


def test_a_factor_that_data_rearranges_is_new_everywhere(traced: Callable) -> None:
    def forward(m: Any, x: Tensor, r: Tensor) -> Tensor:
        return torch.softmax((torch.sin(x) + m.p) * x.repeat_interleave(r, 2, output_size=4), -1)

    graph = traced(forward, (X, torch.tensor([0, 2, 1, 1])), p=b())
    assert not Prover(graph).walk(graph.node_of["p"], ONES).proved


def test_a_constant_tensor_of_minus_infinity_masks_like_the_number(traced: Callable) -> None:
    for fill, proved in ((-torch.inf, True), (-1e38, True), (-9.0, False)):
        mask = lambda m, x, fill=fill: torch.where(x > 0, torch.tensor(fill), x + m.p)  # noqa: E731
        graph = traced(lambda m, x, mask=mask: torch.softmax(mask(m, x), 1), (X,), p=b())
        assert Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved == proved


def test_a_convolution_without_a_batch_axis_is_named_as_such(traced: Callable) -> None:
    for bias in (True, False):
        graph = traced(lambda m, y: m.conv(y + m.p.view(4, 1)), (SQUARE,), p=b(), conv=nn.Conv1d(4, 4, 1, bias=bias))
        blocked = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).blocked
        assert blocked is not None and blocked.op == "aten.conv1d" and "no batch axis" in blocked.why
    graph = traced(lambda m, y: m.conv(y + m.p.view(CHANNELS)), (Y,), p=b(), conv=nn.Conv1d(4, 4, 1))
    blocked = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).blocked
    assert blocked is not None and blocked.op == "output"


def test_a_shift_absorbed_by_a_bias_is_undone_there(traced: Callable) -> None:
    graph = traced(lambda m, x: torch.tanh(m.read(x + m.p)), (X,), p=b(), read=nn.Linear(4, 3))
    outcome = Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5), "biases")
    (absorber, _) = next(iter(outcome.absorbed.values()))
    assert outcome.proved and len(outcome.absorbed) == 1 and absorber.parameter == graph.node_of["read.bias"]
    graph = traced(lambda m, x: torch.tanh(m.read(x + m.p)), (X,), p=b(), read=nn.Linear(4, 3, bias=False))
    assert not Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5), "biases").proved


def test_a_bias_that_is_read_twice_absorbs_nothing(traced: Callable) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x + m.p, m.w) + m.q) * m.q

    graph = traced(forward, (X,), p=b(), w=torch.randn(3, 4), q=b(3))
    assert not Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5), "biases").proved


def test_rows_that_data_puts_in_order_keep_what_their_channels_share(traced: Callable) -> None:
    """As a masked autoencoder puts mask tokens between the visible ones; an index per channel mixes the rows."""
    ordered = lambda m, x, i: soft(torch.gather(beside(m, x), 1, alike(i)))  # noqa: E731
    graph = traced(ordered, (X, TOKENS), p=b())
    assert Prover(graph).walk(graph.node_of["p"], ONES).proved
    assert not Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved
    graph = traced(
        lambda m, x, i: soft(torch.gather(beside(m, x), 1, i.unsqueeze(-1) + m.o)),
        (X, TOKENS % 4),
        p=b(),
        o=nn.Buffer(torch.arange(4) % 2),
    )
    assert not Prover(graph).walk(graph.node_of["p"], ONES).proved


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 4}, {"padding": "valid"}])
def test_a_convolution_without_padding_shifts_all_places_alike(traced: Callable, options: dict) -> None:
    kernel = KERNEL[:, :1] if "groups" in options else KERNEL
    forward = lambda m, y: torch.softmax(F.conv1d(y + m.p.view(CHANNELS), m.w, **options), -1)  # noqa: E731
    graph = traced(forward, (Y,), p=b(), w=kernel)
    assert Prover(graph).walk(graph.node_of["p"], torch.arange(1, 5)).proved
