"""Every turn rule against numbers: moving along a claimed gauge leaves the outputs where they were.

A rule has a case that it must pass soundly and one at which the group must be lost; a rule without them fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deadweight.claims.claim import Claim, Title
from deadweight.graph.node import Graph
from deadweight.laws.catalogue import search
from deadweight.proof.basis import TURN_RULES
from deadweight.search.prover import Prover
from deadweight.search.turns import dimension, spaces, turn_claim

X, WIDE = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0]])
REPEATS = torch.tensor([1, 2, 1])


def case(forward: Callable, *inputs: Tensor, free: int, **parts: Any) -> dict:
    """Four numbers are written into a space of six, which three outputs read; `free` is the dimension of its group."""
    return {"forward": forward, "inputs": inputs or (X,), "free": free, **parts}


def attend(m: Any, x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(1, 2), -1) @ m.write(x)


def joined(m: Any, x: Tensor) -> Tensor:
    space = m.write(x)
    return torch.cat([space[..., 4:], space[..., :4]], -1)


def recur(m: Any, x: Tensor, hidden: Tensor | None = None, kind: str = "rnn_relu") -> Tensor:
    """A plain recurrent layer, whose input weight is m.write's."""
    hidden = x.new_zeros(1, len(x), 6) if hidden is None else hidden
    weights = [m.write.weight, m.square.weight]
    return getattr(torch, kind)(x, hidden, weights, False, 1, 0.0, False, False, True)[0]


def repacked(x: Tensor, fill: float = 0.0) -> Tensor:
    """Two sequences of different lengths, packed and padded again."""
    packed = nn.utils.rnn.pack_padded_sequence(x, [2, 3], batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, padding_value=fill)[0]


def scattered(x: Tensor, reduce: str) -> Tensor:
    """Rows put at two places of four, each channel with an index of its own."""
    index = (torch.arange(18).reshape(1, 3, 6) % 4).expand(2, 3, 6)
    return torch.zeros(2, 4, 6).double().scatter_reduce(1, index, x, reduce, include_self=reduce == "sum")


def half_normed(x: Tensor) -> Tensor:
    return torch.cat([F.rms_norm(x[..., :3], (3,), eps=1e-12), x[..., 3:]], -1)


SOUND: dict[str, list[dict]] = {
    "shape": [
        case(lambda m, x: m.read(m.write(x).transpose(0, 1).unsqueeze(0)), free=36),
        case(lambda m, x: m.read(joined(m, x)), free=36),  # parts that are joined again turn as one
        case(lambda m, x: m.read(m.write(x).unflatten(-1, (2, 3)).flip(1).flatten(-2)), free=36),
    ],
    "index": [case(lambda m, x, i: m.read(m.write(x)[:, i[0]]), X, TOKENS, free=36)],
    "addition": [
        case(lambda m, x: m.read(m.write(x) + m.bias), bias=torch.randn(6), free=36),
        case(lambda m, x: m.read(m.write(x) - m.other(x)), other=nn.Linear(4, 6), free=36),
        case(lambda m, x: m.read(m.write(x) + m.write(x * x)), free=36),
        case(lambda m, x: m.read(torch.sub(m.write(x), m.write(x)[:, :1], alpha=3)), free=36),
    ],
    "negation": [case(lambda m, x: m.read(-m.write(x)), free=36)],
    "product": [
        case(lambda m, x: m.read(3.0 * m.write(x) * x.mean(-1, keepdim=True)), free=36),
        case(lambda m, x: m.read(m.write(x) * m.gain), gain=torch.rand(6) + 0.5, free=36),
        case(lambda m, x, w: m.read(m.write(x) * torch.tanh(w)), X, WIDE, free=6),
        case(lambda m, x: m.read(m.write(x) / 2.0 / (1 + x[..., :1] ** 2)), free=36),
        case(lambda m, x: m.read(m.write(x) * m.write(x).abs()), free=6),
    ],
    "whole_power": [
        case(lambda m, x: m.read(torch.relu(m.write(x)).square()), free=6),
        case(lambda m, x: m.read(m.write(x) ** 3 + m.write(x) * m.write(x).abs() ** 2), free=6),
    ],
    "linear": [case(lambda m, x: m.read(m.write(x)), free=36)],
    "matmul": [case(lambda m, x: m.read(attend(m, x)), free=36)],
    "homogeneous": [
        case(lambda m, x: m.read(torch.relu(m.write(x))), free=6),
        case(lambda m, x: m.read(F.leaky_relu(m.write(x)) + m.write(x).abs()), free=6),
    ],
    "norm_core": [
        case(lambda m, x: m.read(F.rms_norm(m.write(x), (6,), eps=1e-6)), free=15),
        case(lambda m, x: m.read(F.layer_norm(m.write(x), (6,))), free=10),
    ],
    "reduction": [case(lambda m, x: m.read(m.write(x).mean(1) + m.write(x).sum((1,))), free=36)],
    "masked": [case(lambda m, x: m.read(m.write(x).masked_fill(x[..., :1] > 0, 0.0)), free=36)],
    "dropout": [case(lambda m, x: m.read(F.dropout(m.write(x), 0.4, True)), training=True, free=6)],
}
SOUND["padding"] = [
    case(lambda m, x: m.read(F.pad(m.write(x), (0, 0, 1, -1))), free=36),
    case(lambda m, x: m.read(F.pad(m.write(x), (0, 0, 2, 1, 1, 0), value=0.0) * m.gain), gain=torch.rand(6), free=36),
    case(lambda m, x: m.read(torch.constant_pad_nd(m.write(x).mT, (1, 1)).mT), free=36),
    case(lambda m, x: m.read(m.write(x) + F.pad(m.write(x), (0, 0, 1, -1))), free=36),
    case(lambda m, x: m.read(F.pad(m.write(x) * m.gain, (0, 0, 1, -1))), gain=torch.rand(6) + 0.5, free=36),
]
SOUND["addition"] += [
    case(lambda m, x: m.read(m.write(x) * m.gain + m.write(x * x) * (1 - m.gain)), gain=torch.rand(6), free=6),
    case(lambda m, x: m.read(m.write(x) * m.gain + m.write(x * x)), gain=torch.rand(6), free=6),
    case(lambda m, x: m.read(m.write(x) - m.write(x * x) * m.gain), gain=torch.rand(6), free=6),
]
SOUND["recurrent"] = [case(lambda m, x: m.read(recur(m, x)), square=nn.Linear(6, 6), free=6)]
SOUND["packing"] = [case(lambda m, x: m.read(repacked(m.write(x))), free=36)]
SOUND["index"] += [case(lambda m, x, i: m.read(m.write(x).index_select(1, i[0])), X, TOKENS, free=36)]
SOUND["index"] += [case(lambda m, x, i: m.read(m.write(x)[i > 1]), X, TOKENS, free=36)]  # a mask of two axes
SOUND["padding"] += [
    case(lambda m, x: m.read(F.pad(m.write(x).mT, (1, -1), "circular").mT), free=36),
    case(lambda m, x: m.read(F.pad(m.write(x).mT, (2, 1), "reflect").mT), free=36),
    case(lambda m, x: m.read(F.pad(m.write(x).mT, (2, 1), "replicate").mT), free=36),
]
SOUND["reduction"] += [case(lambda m, x: m.read(m.write(x).mT.mean(-1)), free=36)]
SOUND["dropout"] += [
    case(lambda m, x: m.read(torch.native_dropout(m.write(x), 0.4, True)[0]), training=True, free=6),
    case(lambda m, x: m.read(F.dropout1d(m.write(x), 0.4, True)), training=True, free=6),
]
SOUND["averages"] = [
    case(lambda m, x: m.read(F.avg_pool1d(m.write(x).mT, 2, 1, 1).mT), free=36),
    case(lambda m, x: m.read(F.adaptive_avg_pool1d(m.write(x).mT, 2).mT), free=36),
    case(lambda m, x: m.read(F.interpolate(m.write(x).mT, size=7, mode="linear").mT), free=36),
    case(lambda m, x: m.read(m.write(x).cumsum(1)), free=36),
    case(lambda m, x: m.read(m.write(x) + m.write(x).cumsum(1) * m.gain), gain=torch.rand(6) + 0.5, free=6),
]
SOUND["homogeneous_over_places"] = [
    case(lambda m, x: m.read(F.max_pool1d(m.write(x).mT, 2, 1, 1).mT), free=6),
    case(lambda m, x: m.read(F.adaptive_max_pool1d(m.write(x).mT, 2).mT), free=6),
    case(lambda m, x: m.read(m.write(x).amax(1) - m.write(x).amin((1,))), free=6),
    case(lambda m, x: m.read(m.write(x).max(1)[0] + m.write(x).topk(2, 1).values.sum(1)), free=6),
    case(lambda m, x: m.read(m.write(x).std(1) + m.write(x).norm(dim=1)), free=6),
]
SOUND["scattered"] = [
    case(lambda m, x: m.read(torch.zeros(2, 4, 6).double().index_add(1, REPEATS, m.write(x))), free=36),
    case(lambda m, x: m.read(m.write(x).index_add(1, REPEATS, m.write(x * x), alpha=2)), free=36),
    case(lambda m, x: m.read(scattered(m.write(x), "sum")), free=6),
    case(lambda m, x: m.read(scattered(torch.relu(m.write(x)), "amax")), free=6),
]
BLOCKS = {"reaches_output"}  # no turn passes: there is nothing to be sound about

SILENT: dict[str, list[dict]] = {
    "shape": [
        case(lambda m, x, w: m.read(torch.cat([m.write(x), w], 1)), X, WIDE, free=0),
        case(lambda m, x, r: m.read(m.write(x).repeat_interleave(r, 1, output_size=4)), X, REPEATS, free=0),
    ],
    "index": [
        case(lambda m, x, i: m.read(m.write(x)[..., torch.cat([i[0], i[1]])]), X, TOKENS, free=0),
        case(lambda m, x, i: m.read(m.write(x).index_select(2, i.flatten())), X, TOKENS, free=0),
        case(lambda m, x, i: m.read(m.write(x)[(i > 1).unsqueeze(-1).expand(2, 3, 6)].view(3, 6)), X, TOKENS, free=0),
    ],
    "addition": [
        case(lambda m, x: m.read(m.write(x) + 1.0), free=0),
        case(lambda m, x, w: m.read(m.write(x) + w), X, WIDE, free=0),
        case(lambda m, x: m.read(m.write(x) + m.bias) * m.bias.sum(), bias=torch.randn(6), free=0),
    ],
    "negation": [case(lambda m, x: m.read(torch.exp(-m.write(x))), free=0)],
    "product": [
        case(lambda m, x: m.read(m.write(x) * m.write(x).roll(1, -1)), free=0),
        case(lambda m, x, w: m.read(w / m.write(x)), X, WIDE, free=0),
    ],
    "linear": [
        case(lambda m, x: (m.read(m.write(x)), m.write(x)), free=0),
        case(lambda m, x: m.read(m.write(x)) + m.read.weight.sum(), free=0),
    ],
    "matmul": [case(lambda m, x: m.read(m.write(x)) @ (m.write(x) @ m.write(x).transpose(1, 2))[:, :, :3], free=0)],
    "whole_power": [
        case(lambda m, x: m.read(m.write(x) ** 2 + m.write(x)), free=0),
        case(lambda m, x: m.read(m.write(x).abs() ** 1.5), free=0),
    ],
    "homogeneous": [case(lambda m, x: m.read(F.gelu(m.write(x))), free=0)],
    "norm_core": [case(lambda m, x: m.read(half_normed(m.write(x))), free=3**2 + 3)],
    "reduction": [case(lambda m, x: m.read(m.write(x)) + m.write(x).sum(-1, keepdim=True), free=0)],
    "masked": [case(lambda m, x: m.read(m.write(x).masked_fill(x[..., :1] > 0, 5.0)), free=0)],
    "dropout": [case(lambda m, x: m.read(torch.tanh(F.dropout(m.write(x), 0.4, True))), training=True, free=0)],
    "packing": [case(lambda m, x: m.read(repacked(m.write(x), 1.0)), free=0)],
    "padding": [
        case(lambda m, x: m.read(F.pad(m.write(x), (0, 0, 1, -1), value=1.0)), free=0),
        case(lambda m, x: m.read(torch.constant_pad_nd(m.write(x), (0, 0, 1, -1), 1.0)), free=0),
        case(lambda m, x: m.read(F.pad(m.write(x), (1, -1), "circular")), free=0),
        case(lambda m, x: m.read(F.pad(m.write(x), (1, -1))), free=0),
    ],
    "averages": [
        case(lambda m, x: m.read(F.avg_pool1d(m.write(x), 3, 1, 1)), free=0),
        case(lambda m, x: m.read(m.write(x).cumsum(-1)), free=0),
    ],
    "homogeneous_over_places": [
        case(lambda m, x: m.read(F.max_pool1d(m.write(x), 3, 1, 1)), free=0),
        case(lambda m, x, w: m.read(torch.max(m.write(x), w)), X, WIDE, free=0),
        case(lambda m, x: m.read(m.write(x)) * m.write(x).amax(-1, keepdim=True), free=0),
        case(lambda m, x: m.read(m.write(x).sort(-1)[0]), free=0),
        case(lambda m, x: m.read(m.write(x).logsumexp(1)), free=0),
    ],
    "scattered": [
        case(lambda m, x: m.read(torch.ones(2, 4, 6).double().index_add(1, REPEATS, m.write(x))), free=0),
        case(lambda m, x, w: m.read(w.index_add(1, REPEATS, m.write(x))), X, WIDE, free=0),
        case(lambda m, x: m.read(scattered(m.write(x), "prod")), free=0),
        case(lambda m, x: m.read(m.write(x).index_add(2, REPEATS.repeat(2), m.write(x))), free=0),
    ],
    "recurrent": [
        case(lambda m, x: recur(m, x), square=nn.Linear(6, 6), free=0),
        case(lambda m, x: m.read(recur(m, x, kind="rnn_tanh")), square=nn.Linear(6, 6), free=0),
        case(lambda m, x, w: m.read(recur(m, x, w[:, 0][None])), X, WIDE, square=nn.Linear(6, 6), free=0),
        case(lambda m, x: m.read(m.square(recur(m, x))), square=nn.Linear(6, 6), free=0),
    ],
    "reaches_output": [
        case(lambda m, x: (m.read(h := m.write(x)), h), free=0),
        case(lambda m, x: (m.read(m.write(x)), m.write.weight), free=0),
        case(lambda m, x: (m.read(m.write(x)), m.read.weight), free=0),
        case(lambda m, x: (m.read(m.write(x) + m.bias), m.bias), bias=torch.randn(6), free=0),
    ],
}


def rows(table: dict[str, list[dict]]) -> list[Any]:
    return [pytest.param(name, e, id=f"{name}-{i}") for name, cases in table.items() for i, e in enumerate(cases)]


def test_every_rule_has_a_sound_and_a_silent_case() -> None:
    rules = {rule.__name__ for rule in TURN_RULES.values()}
    assert rules == set(SOUND) | BLOCKS == set(SILENT)


def built(traced: Callable, entry: dict) -> tuple[Graph, Prover]:
    entry = {k: v for k, v in entry.items() if k != "free"}
    parts = {"write": nn.Linear(4, 6, bias=False), "read": nn.Linear(6, 3, bias=False)}
    graph = traced(entry.pop("forward"), entry.pop("inputs"), **{**parts, **entry})
    return graph, Prover(graph)


def claims_of(prover: Prover) -> list[Claim]:
    proved = [s for s in spaces(prover) if s.turned.proved and dimension(s.turned)]
    return [turn_claim(prover, Title("DW000", "space"), s.writers.sites[0].parameter, s.turned) for s in proved]


@pytest.mark.parametrize(("name", "entry"), rows(SOUND))
def test_moving_along_the_group_changes_nothing(
    traced: Callable, assert_flat: Callable, name: str, entry: dict
) -> None:
    graph, prover = built(traced, entry)
    claims = [c for c in claims_of(prover) if c.node == graph.node_of["write.weight"]]
    assert sum(c.dof for c in claims) == entry["free"]
    assert name in {TURN_RULES[s.op].__name__ for c in claims for s in c.steps if s.op in TURN_RULES}
    for claim in claims:
        assert_flat(graph, claim, entry["inputs"])


@pytest.mark.parametrize(("name", "entry"), rows(SILENT))
def test_a_lost_group_is_not_claimed(traced: Callable, assert_flat: Callable, name: str, entry: dict) -> None:
    graph, prover = built(traced, entry)
    claims = [c for c in claims_of(prover) if c.node == graph.node_of["write.weight"]]
    assert sum(c.dof for c in claims) == entry["free"]
    for claim in search(graph).claims:
        assert_flat(graph, claim, entry["inputs"])


def two_halves(m: Any, x: Tensor) -> Tensor:
    space, rest = attend(m, x), torch.sin(torch.cat([x, x[..., :2]], -1))
    return m.wide(torch.cat([space, rest], -1)) * torch.tanh(m.wide(torch.cat([rest, space], -1)))


UNSOUND = {
    "a weight that reads the space in two places": pytest.param(two_halves),
    "a writer that reads its own space": lambda m, x: m.read(stacked(m, m.write(x))),
    "one weight in series with itself": lambda m, x: m.read(m.square(m.square(m.write(x)))),
    "a query that is also read unit by unit": lambda m, x: products(m, x, torch.relu),
    "a query behind a gate": lambda m, x: products(m, x, lambda q: q * torch.tanh(m.gate(x))),
    "a query added to itself, moved on and weighed": lambda m, x: weighed(m.write(x), 2.0) @ m.other(x).mT,
    "a position table as wide as it is long": lambda m, x: m.mix(torch.relu(m.conv(m.grow(x).mT) + m.table)),
}


def stacked(m: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x + m.square(F.rms_norm(x, (6,), eps=1e-6)), (6,), eps=1e-6)


def weighed(h: Tensor, alpha: float) -> Tensor:
    return torch.add(3.0 * h, h.roll(1, -1), alpha=alpha)


def products(m: Any, x: Tensor, change: Callable) -> tuple[Tensor, Tensor]:
    q, k = m.write(x), m.other(x)
    return q @ k.transpose(1, 2), m.read(change(q))


@pytest.mark.parametrize("forward", UNSOUND.values(), ids=list(UNSOUND))
def test_no_gauge_is_claimed_that_does_not_hold(traced: Callable, assert_flat: Callable, forward: Callable) -> None:
    parts = {
        "write": nn.Linear(4, 6, bias=False),
        "read": nn.Linear(6, 6, bias=False),
        "square": nn.Linear(6, 6, bias=False),
        "wide": nn.Linear(12, 3, bias=False),
        "other": nn.Linear(4, 6),
        "gate": nn.Linear(4, 6),
        "grow": nn.Conv1d(3, 6, 1),
        "conv": nn.Conv1d(4, 6, 1, bias=False),
        "mix": nn.Conv1d(6, 2, 1),
        "table": torch.randn(6, 6),
    }
    inputs = (X,)
    graph = traced(forward, inputs, **parts)
    for claim in search(graph).claims:
        if claim.tier != "epsilon":
            assert_flat(graph, claim, inputs)
