"""Odd modules: written so that a careless rule would claim something false. Each has a neighbour where the law holds.

Every claim of the search itself, before checker and evidence sort any out, is held against the Jacobian's null space.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
from deadweight.audit.account import make_account
from deadweight.audit.checker import replay, structure
from deadweight.claims.point import Point
from deadweight.graph.bind import bind
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.source.randomise import randomise

WIDTH, LENGTH = 4, 5
X, Y = torch.randn(2, LENGTH, WIDTH), torch.randn(2, WIDTH, 6)


class Odd(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if type(part) is Tensor else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def linear(a: int = WIDTH, b: int = WIDTH, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(a, b, bias=bias)


def heads(**parts: Any) -> dict[str, Any]:
    return {"q": linear(), "k": linear(), "v": linear(), "o": linear(), **parts}


def attend(q: Tensor, k: Tensor, v: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(WIDTH), axis) @ v


def found(module: nn.Module, *inputs: Tensor, training: bool = False) -> dict[tuple[str, str], int]:
    """What the search claims, by law and parameter; every claim must lie in the null space and replay."""
    graph = canonical(trace(module.train(training), inputs))
    claims = search(graph).claims
    values = values_of(graph, module)

    def draw(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(x.shape, generator=generator) if x.is_floating_point() else x for x in inputs]
        return bind(graph, tuple(drawn), {})

    counted = make_account(graph, values, draw, claims, most_inputs=300)
    assert not counted.unsound, [(c.code, graph.parameters[c.node], e) for c, e in counted.unsound]
    assert not structure(graph, claims)
    assert replay(claims, Point(graph, values, draw(2))).faults == {}
    assert sum(c.dof for c in claims if c.tier != "epsilon") == counted.completeness.explained - epsilons(claims)
    total: dict[tuple[str, str], int] = {}
    for c in claims:
        key = (c.code, graph.parameters[c.node])
        total[key] = total.get(key, 0) + c.dof
    return total


def epsilons(claims: list[Any]) -> int:
    """Scales that die in a norm without an ε are counted where they hold exactly."""
    return sum(c.dof for c in claims if c.tier == "epsilon" and c.epsilon < 1e-10)


def values_of(graph: Graph, module: nn.Module) -> dict[str, Tensor]:
    random = randomise(module, 0)
    values = {n: t.detach().double() if t.is_floating_point() else t for n, t in graph.tensors.items()}
    return values | {node: random.get_parameter(name).detach() for node, name in graph.parameters.items()}


def laws(claims: dict[tuple[str, str], int], parameter: str) -> set[str]:
    return {code for code, name in claims if name == parameter}


def attention(m: Odd, x: Tensor) -> Tensor:
    return m.o(attend(m.q(x), m.k(x), m.v(x)))


# What is returned is read.
RETURNED: dict[str, tuple[Callable, dict[str, Any], str, set[str]]] = {
    "a key bias": (lambda m, x: (attention(m, x), m.k.bias), heads(), "k.bias", {"DW002"}),
    "a key": (lambda m, x: (m.o(attend(m.q(x), k := m.k(x), m.v(x))), k), heads(), "k.weight", {"DW009"}),
    "a key bias that turns": (lambda m, x: (attention(m, x), m.k.bias), heads(), "k.weight", {"DW009"}),
    "an output bias": (lambda m, x: (attention(m, x), m.o.bias), heads(), "v.bias", {"DW003"}),
    "a branch before its scale": (
        lambda m, x: (m.n(x + m.s * (h := m.a(x))), h),
        {"n": nn.LayerNorm(WIDTH), "s": torch.randn(WIDTH), "a": linear()},
        "a.weight",
        {"DW005"},
    ),
    "a factor's own input": (
        lambda m, x: (x + m.s * (h := m.a(torch.tanh(x))), h),
        {"s": torch.randn(WIDTH), "a": linear()},
        "s",
        {"DW011"},
    ),
    "a gain": (
        lambda m, x: (m.a(m.n(x)), m.n.weight),
        {"n": nn.LayerNorm(WIDTH), "a": linear()},
        "n.weight",
        {"DW006"},
    ),
    "a weight": (lambda m, x: (m.b(m.a(x)), m.a.weight), {"a": linear(4, 3), "b": linear(3, 4)}, "a.weight", {"DW019"}),
    "a reader": (lambda m, x: (m.b(m.a(x)), m.b.weight), {"a": linear(4, 3), "b": linear(3, 4)}, "a.weight", {"DW019"}),
}


@pytest.mark.parametrize(("forward", "parts", "parameter", "codes"), RETURNED.values(), ids=list(RETURNED))
def test_what_is_returned_is_read(forward: Callable, parts: dict, parameter: str, codes: set[str]) -> None:
    assert not laws(found(Odd(forward, **parts), X), parameter) & codes
    assert codes <= laws(found(Odd(lambda m, x: forward(m, x)[0], **parts), X), parameter)


def test_statistics_whose_input_is_returned_keep_their_gain() -> None:
    parts = {"c": nn.Conv1d(WIDTH, 3, 1), "bn": nn.BatchNorm1d(3)}
    assert not laws(found(Odd(lambda m, y: (m.bn(h := m.c(y)), h), **parts), Y), "bn.weight")
    assert laws(found(Odd(lambda m, y: m.bn(m.c(y)), **parts), Y), "bn.weight") == {"DW004"}


# A single number is a parameter like others.
SINGLE: dict[str, tuple[Callable, dict[str, Any], set[str]]] = {
    "dies in a softmax": (lambda m, x: torch.softmax(m.a(x) + m.s, 1), {"a": linear()}, {"DW018"}),
    "multiplies": (lambda m, x: torch.softmax(m.a(x) * m.s, 1), {"a": linear()}, {"DW011"}),
    "multiplies what is bounded": (lambda m, x: torch.softmax(torch.tanh(m.a(x)) * m.s, 1), {"a": linear()}, set()),
    "before a LayerNorm": (lambda m, x: F.layer_norm(m.a(x) + m.s, (WIDTH,)), {"a": linear()}, {"DW005"}),
    "before an RMSNorm": (lambda m, x: F.rms_norm(m.a(x) + m.s, (WIDTH,)), {"a": linear()}, {"DW017"}),
    "added to values": (lambda m, x: m.o(attend(m.q(x), m.k(x), m.v(x) + m.s)), heads(), {"DW017"}),
    "added to hidden units": (
        lambda m, x: m.b(torch.relu(m.a(x) + m.s)),
        {"a": linear(4, 6), "b": linear(6, 4)},
        {"DW017"},
    ),
    "scores": (lambda m, x: m.o(torch.softmax(m.q(x) @ m.k(x).mT + m.s, -1) @ m.v(x)), heads(), {"DW018"}),
}


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(("forward", "parts", "codes"), SINGLE.values(), ids=list(SINGLE))
def test_a_single_number_is_audited_like_a_vector(
    forward: Callable, parts: dict, codes: set[str], shape: tuple[int, ...]
) -> None:
    assert laws(found(Odd(forward, s=torch.randn(shape), **parts), X), "s") == codes
    assert deadweight.audit(Odd(forward, s=torch.randn(shape), **parts), X).untraced is None


def test_a_number_that_a_softmax_and_a_norm_ignore_is_counted_once() -> None:
    both = Odd(
        lambda m, x: torch.softmax(m.a(x) + m.s, 1) + F.layer_norm(x + m.s, (WIDTH,)), s=torch.randn(1), a=linear()
    )
    assert sum(n for (_, name), n in found(both, X).items() if name == "s") == 1


def test_a_layernorm_over_positions_ignores_a_bias_of_every_channel() -> None:
    parts = {"a": linear()}
    over = lambda m, x: F.layer_norm(m.a(x).mT, (LENGTH,))  # noqa: E731
    assert found(Odd(over, **parts), X)["DW005", "a.bias"] == WIDTH
    assert found(Odd(lambda m, x: F.layer_norm(m.a(x), (WIDTH,)), **parts), X)["DW005", "a.bias"] == 1
    assert not laws(found(Odd(lambda m, x: F.rms_norm(m.a(x).mT, (LENGTH,)), **parts), X), "a.bias")


def test_a_logarithm_of_softmax_ignores_a_key_bias_but_does_not_sum_to_one() -> None:
    logarithm = lambda m, x: m.o(F.log_softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x))  # noqa: E731
    claims = found(Odd(logarithm, **heads()), X)
    assert laws(claims, "k.bias") == {"DW002"} and not laws(claims, "v.bias") & {"DW003"}


def test_a_model_in_which_everything_is_dead_is_counted() -> None:
    result = deadweight.audit(Odd(lambda m, x: torch.softmax(x + m.b, 1), b=torch.randn(WIDTH)), X, complete=True)
    assert result.completeness is not None
    assert (result.completeness.measured, result.completeness.explained) == (WIDTH, WIDTH)


def test_the_mean_of_a_weight_that_reads_a_layernorm_is_counted_once() -> None:
    read = lambda m, x: torch.softmax(m.a(F.layer_norm(x, (WIDTH,))), -1)  # noqa: E731
    claims = found(Odd(read, a=linear(WIDTH, 3, bias=False)), X)
    assert claims == {("DW018", "a.weight"): WIDTH, ("DW008", "a.weight"): 3 - 1}


def test_a_table_whose_rows_have_dead_means_gives_one_vector_less_to_the_next() -> None:
    class Added(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x + self.bias + self.table, -1)

    claims = found(Added(attend, table=torch.randn(LENGTH, WIDTH), bias=torch.randn(WIDTH)), X)
    assert sum(claims.values()) == LENGTH + 1 + (WIDTH - 1)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_statistics_without_running_ones_leave_a_bias_dead(affine: bool) -> None:
    norm = nn.BatchNorm1d(3, affine=affine, track_running_stats=False)
    claims = found(Odd(lambda m, y: m.bn(m.c(y)), c=nn.Conv1d(WIDTH, 3, 1), bn=norm), Y)
    assert claims["DW004", "c.bias"] == 3

    def in_place(m: Odd, y: Tensor) -> Tensor:  # torch.export spells the norm otherwise once something is overwritten
        return F.batch_norm(m.c(y).mul_(2.0), None, None, training=True)

    assert found(Odd(in_place, c=nn.Conv1d(WIDTH, 3, 1)), Y, training=True) == {("DW004", "c.bias"): 3}


CHAIN = {"a": linear(WIDTH, 6), "b": linear(6, WIDTH), "g": torch.rand(6) + 0.5}
CONVOLVED = {"a": nn.Conv1d(WIDTH, 6, 1), "b": nn.Conv1d(6, WIDTH, 1), "g": torch.rand(6) + 0.5}


def test_a_divisor_of_every_coordinate_is_no_gain() -> None:
    assert found(Odd(lambda m, x: m.b(m.a(x) * m.g), **CHAIN), X)["DW019", "a.weight"] == 6**2 - 2 * 2
    assert found(Odd(lambda m, x: m.b(m.a(x) / m.g), **CHAIN), X)["DW011", "a.weight"] == 6


def test_a_factor_of_every_place_is_no_gain_of_the_channels() -> None:
    places = torch.randn(2, WIDTH, 6)  # as many places as channels behind the first map
    assert "DW019" not in laws(found(Odd(lambda m, y: m.b(m.a(y) * m.g), **CONVOLVED), places), "a.bias")
    assert "DW019" in laws(found(Odd(lambda m, y: m.b(m.a(y)), **CONVOLVED), places), "a.weight")


@pytest.mark.parametrize("shape", [(0,), (2, 0, 6)])
def test_an_empty_value_of_another_precision_beside_a_space_has_nothing_to_turn(shape: tuple[int, ...]) -> None:
    def read(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(torch.cat([m.a(x), torch.zeros(shape, dtype=torch.float64)], 1).to(x.dtype))

    assert found(Odd(read, **CHAIN), X)["DW019", "a.weight"] == 6**2 - 2 * 2


def test_a_gain_of_many_channels_behind_one_row_is_no_gain_of_its_rows() -> None:
    parts = {"b": linear(6, WIDTH), "g": torch.rand(6) + 0.5}
    widened = lambda m, x: torch.tanh(m.b(m.a(x) * m.g))  # noqa: E731
    narrow = found(Odd(widened, a=nn.Linear(WIDTH, 1, bias=False), **parts), X)
    assert narrow == {("DW011", "a.weight"): 1, ("DW011", "g"): 6}  # b reads the six channels, a writes one
    assert found(Odd(widened, a=nn.Linear(WIDTH, 6, bias=False), **parts), X)["DW011", "g"] == 6


@pytest.mark.parametrize("spread", [lambda t: t.tile(1, 1, 2), lambda t: t.repeat_interleave(2, -1)])
def test_values_that_are_repeated_side_by_side_turn_copy_by_copy(spread: Callable) -> None:
    parts = {"q": linear(), "k": linear(), "v": linear(WIDTH, 2), "o": linear()}
    claims = found(Odd(lambda m, x: m.o(attend(m.q(x), m.k(x), spread(m.v(x)))), **parts), X)
    assert claims["DW010", "v.weight"] == 4


def test_one_number_for_all_channels_is_no_gain_to_fold() -> None:
    read = lambda m, x: m.a(F.layer_norm(x, (WIDTH,)) * m.g.expand(WIDTH))  # noqa: E731
    assert not laws(found(Odd(read, a=linear(), g=torch.randn(1)), X), "g")
    assert laws(found(Odd(read, a=linear(), g=torch.randn(WIDTH)), X), "g") == {"DW006"}
    branch = lambda m, x: x + m.s.expand(WIDTH) * m.a(torch.tanh(x))  # noqa: E731
    assert not laws(found(Odd(branch, a=linear(), s=torch.randn(1)), X), "s")


TOKENS = torch.tensor([[0, 1, 6, 2, 3], [5, 4, 4, 0, 6]])
INDICES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a distance": (lambda t: t.flip(1) - t + 8, 0),
    "less, then more": (lambda t: (t - 2) + 2, 0),
    "counted backwards": (lambda t: t * -1 + 8, 0),
    "positions behind an offset": (lambda t: torch.arange(t.shape[1]) + 2, 2),
    "counted tokens": (lambda t: (t != 1).int().cumsum(1) * (t != 1).int() + 1, 1),
}


@pytest.mark.parametrize(("index", "unread"), INDICES.values(), ids=list(INDICES))
def test_rows_are_unread_only_below_every_index(index: Callable, unread: int) -> None:
    module = Odd(lambda m, t: torch.tanh(m.e(index(t))), e=nn.Embedding(20, WIDTH))
    assert found(module, TOKENS).get(("DW001", "e.weight"), 0) == unread * WIDTH


def test_a_query_that_meets_itself_too_has_no_free_basis() -> None:
    both = lambda m, x: attend(q := m.q(x), q, x) + attend(q, m.k(x), torch.tanh(x))  # noqa: E731
    assert "DW009" not in laws(found(Odd(both, q=linear(), k=linear()), X), "k.weight")


def test_queries_and_keys_that_meet_twice_share_one_basis() -> None:
    turned = lambda m, x: attend(q := m.q(x), k := m.k(x), x) + attend(k, q, torch.tanh(x))  # noqa: E731
    claims = found(Odd(turned, q=linear(), k=linear()), X)
    assert sum(n for (code, _), n in claims.items() if code == "DW009") == WIDTH**2
    rolled = lambda m, x: attend(q := m.q(x), k := m.k(x), x) + attend(q, k.roll(1, -1), torch.tanh(x))  # noqa: E731
    assert found(Odd(rolled, q=linear(), k=linear()), X)["DW009", "k.weight"] == WIDTH  # what commutes with the roll


def test_rows_and_columns_of_a_square_table_are_not_confused() -> None:
    tokens = torch.tensor([[0, 1, 3, 2], [2, 2, 0, 1]])
    claims = found(Odd(lambda m, t: torch.softmax(m.e(t), -1), e=nn.Embedding(4, 4)), tokens)
    assert claims == {("DW018", "e.weight"): 4}


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {}], ids=str)
def test_how_a_table_is_trained_is_no_part_of_the_function(options: dict) -> None:
    sums = lambda m, t: torch.tanh(m.e(t) + m.p(torch.arange(LENGTH)))  # noqa: E731
    module = Odd(sums, e=nn.Embedding(7, WIDTH, **options), p=nn.Embedding(LENGTH, WIDTH))
    result = deadweight.audit(module, TOKENS)
    assert [(f.code, f.dof) for f in result.findings] == [("DW013", WIDTH)] and not result.unknown


def test_values_that_a_norm_reads_are_one_space_under_one_law() -> None:
    normed = lambda m, x: m.o(F.layer_norm(attend(m.q(x), m.k(x), m.v(x)), (WIDTH,)))  # noqa: E731
    assert {code for code, name in found(Odd(normed, **heads()), X) if code in ("DW010", "DW012")} == {"DW010"}


def summed(scores: str, mixed: str, axis: int) -> Callable:
    """Attention in Einstein's notation."""

    def forward(m: Odd, x: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum(scores, m.q(x), m.k(x)), axis)
        return m.o(torch.einsum(mixed, weights, m.v(x)))

    return forward


NOTATIONS: dict[str, tuple[Callable, set[str], set[str]]] = {
    "over the keys": (summed("bid,bjd->bij", "bij,bjd->bid", -1), {"k.bias"}, {"v.bias"}),
    "keys first": (summed("bid,bjd->bji", "bji,bjd->bid", 1), {"k.bias"}, {"v.bias"}),
    "over the queries": (summed("bid,bjd->bij", "bij,bjd->bid", 1), {"q.bias"}, set()),
    "handed to the keys": (summed("bid,bjd->bij", "bij,bid->bjd", -1), {"k.bias"}, set()),
    "channel by channel": (summed("bid,bid->bid", "bid,bid->bid", 1), set(), set()),
}


@pytest.mark.parametrize(("forward", "dead", "folds"), NOTATIONS.values(), ids=list(NOTATIONS))
def test_einsum_is_read_like_the_products_it_stands_for(forward: Callable, dead: set[str], folds: set[str]) -> None:
    claims = found(Odd(forward, **heads()), X)
    assert {name for code, name in claims if code == "DW002"} == dead
    assert {name for code, name in claims if code == "DW003"} == folds


def test_a_gate_on_the_queries_leaves_a_scale_of_each_channel() -> None:
    """What the gate is made of stands behind a sigmoid: it is no projection that could turn along."""
    claims = found(
        Odd(lambda m, x: attend(m.q(x) * torch.sigmoid(m.g(x)), m.k(x), torch.tanh(x)), **heads(g=linear())), X
    )
    assert claims["DW009", "k.weight"] == WIDTH
