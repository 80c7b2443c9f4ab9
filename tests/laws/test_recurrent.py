"""Recurrent layers: of the two biases of a gate only the sum counts, but where the reset gate stands between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.audit.result import Audit

STEPS, WIDTH, HIDDEN, SMALL = 5, 3, 4, 2


class Chain(nn.Module):
    """Modules in a row; of a recurrent one the sequence goes on."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Calls(nn.Module):
    """A forward function over named modules."""

    def __init__(self, forward: Callable, **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@pytest.fixture
def stream() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, STEPS, WIDTH)


def accounted(module: nn.Module, *inputs: Tensor) -> Audit:
    torch.manual_seed(0)
    result = deadweight.audit(module, inputs, complete=True)
    account = result.completeness
    assert account is not None and account.unsound == 0
    assert account.explained == account.measured == result.redundant, (account, result.findings)
    assert not result.unknown
    return result


def by_law(result: Audit) -> dict[str, int]:
    return {code: count for code, count in result.completeness.by_law if count}  # type: ignore[union-attr]


def lstm(**options: Any) -> nn.Module:
    return nn.LSTM(WIDTH, HIDDEN, batch_first=True, **options)


def gru(**options: Any) -> nn.Module:
    return nn.GRU(WIDTH, HIDDEN, batch_first=True, **options)


def rnn(**options: Any) -> nn.Module:
    return nn.RNN(WIDTH, HIDDEN, batch_first=True, **options)


BOTH = {"num_layers": 2, "bidirectional": True}
COUNTS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "LSTM": (lstm, {"DW017": 4 * HIDDEN}),
    "GRU": (gru, {"DW017": 2 * HIDDEN}),
    "RNN": (rnn, {"DW017": HIDDEN}),
    "LSTM, stacked, both directions": (lambda: lstm(**BOTH), {"DW017": 4 * 4 * HIDDEN}),
    "GRU, stacked, both directions": (lambda: gru(**BOTH), {"DW017": 4 * 2 * HIDDEN}),
    "RNN, stacked, both directions": (lambda: rnn(**BOTH), {"DW017": 4 * HIDDEN}),
    "LSTM and a linear map": (lambda: Chain(lstm(), nn.Linear(HIDDEN, 2)), {"DW017": 4 * HIDDEN}),
    "LayerNorm and LSTM": (
        lambda: Chain(nn.LayerNorm(WIDTH), lstm()),
        {"DW017": 4 * HIDDEN, "DW006": 2 * WIDTH, "DW008": 4 * HIDDEN},
    ),
    "LayerNorm and GRU in both directions": (
        lambda: Chain(nn.LayerNorm(WIDTH), gru(bidirectional=True)),
        {"DW017": 2 * 2 * HIDDEN, "DW006": 2 * WIDTH, "DW008": 2 * 3 * HIDDEN},
    ),
    "RMSNorm and RNN": (lambda: Chain(nn.RMSNorm(WIDTH), rnn()), {"DW017": HIDDEN, "DW006": WIDTH}),
    "projected LSTM": (lambda: lstm(proj_size=SMALL), {"DW017": 4 * HIDDEN}),
    "projected LSTM, stacked, and a linear map": (
        lambda: Chain(lstm(proj_size=SMALL, num_layers=2), nn.Linear(SMALL, 2)),
        {"DW017": 2 * 4 * HIDDEN, "DW019": 2 * SMALL**2},
    ),
    "projected LSTM, both directions, and a linear map": (
        lambda: Chain(lstm(proj_size=SMALL, bidirectional=True), nn.Linear(2 * SMALL, 2)),
        {"DW017": 2 * 4 * HIDDEN, "DW019": 2 * SMALL**2},
    ),
    "ReLU RNN and a linear map": (
        lambda: Chain(rnn(nonlinearity="relu"), nn.Linear(HIDDEN, 2)),
        {"DW017": HIDDEN, "DW011": HIDDEN},
    ),
    "ReLU RNN": (lambda: rnn(nonlinearity="relu"), {"DW017": HIDDEN}),
    "a linear map and GRU": (
        lambda: Chain(nn.Linear(WIDTH, SMALL), nn.GRU(SMALL, HIDDEN, batch_first=True)),
        {"DW017": 2 * HIDDEN + SMALL, "DW019": SMALL**2},
    ),
}


@pytest.mark.parametrize(("build", "expected"), COUNTS.values(), ids=list(COUNTS))
def test_the_account_of_a_recurrent_model_is_complete(
    stream: Tensor, build: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    assert by_law(accounted(build(), stream)) == expected


def unrolled(kind: type[nn.Module], **options: Any) -> nn.Module:
    """A cell in a Python loop, from a state of zeros."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return Calls(forward, cell=kind(WIDTH, HIDDEN, **options), head=nn.Linear(HIDDEN, 2))


CELLS = [
    (nn.LSTMCell, {}, {"DW017": 4 * HIDDEN}),
    (nn.GRUCell, {}, {"DW017": 2 * HIDDEN}),
    (nn.RNNCell, {}, {"DW017": HIDDEN}),
    (nn.RNNCell, {"nonlinearity": "relu"}, {"DW017": HIDDEN, "DW011": HIDDEN}),
    (nn.GRUCell, {"bias": False}, {}),
]


@pytest.mark.parametrize(("kind", "options", "expected"), CELLS, ids=str)
def test_the_account_of_a_cell_in_a_loop_is_complete(
    stream: Tensor, kind: type[nn.Module], options: dict[str, Any], expected: dict[str, int]
) -> None:
    assert by_law(accounted(unrolled(kind, **options), stream)) == expected


def test_one_claim_speaks_of_all_gates_of_an_lstm(examine: Callable, stream: Tensor) -> None:
    for module in (Chain(lstm()), unrolled(nn.LSTMCell)):
        (found,) = [f for f in examine(module, stream).audit.findings if f.code == "DW017"]
        assert (found.slice, found.dof, found.verdict) == (None, 4 * HIDDEN, "folds")
        assert found.parameter.replace("_ih", "_hh") == found.into[0] and len(found.into) == 1


def test_the_new_gate_of_a_gru_keeps_both_biases(examine: Callable, stream: Tensor) -> None:
    told = examine(gru(), stream)
    (found,) = told.found("DW017", "bias_ih_l0")
    assert found.slice == ((0, 2 * HIDDEN),) and found.into == ("bias_hh_l0",)
    assert not told.laws_of("bias_hh_l0")
    module = gru().double()
    torch.stack([out.sum() for out in module(stream.double())]).sum().backward()
    ours, theirs = module.bias_ih_l0.grad, module.bias_hh_l0.grad
    assert torch.allclose(ours[: 2 * HIDDEN], theirs[: 2 * HIDDEN], rtol=1e-12)
    assert float((ours - theirs)[2 * HIDDEN :].abs().min()) > 1e-3


@pytest.mark.parametrize("build", [lstm, gru, rnn])
def test_a_layer_without_biases_has_nothing_to_merge(
    examine: Callable, stream: Tensor, build: Callable[..., nn.Module]
) -> None:
    assert not examine(Chain(build(bias=False)), stream).audit.findings


def share(name: str, *layers: nn.Module) -> list[nn.Module]:
    for layer in layers[1:]:
        setattr(layer, name, getattr(layers[0], name))
    return list(layers)


def test_a_bias_that_two_layers_share_takes_nothing_over(examine: Callable, stream: Tensor) -> None:
    first, second = share("bias_hh_l0", lstm(), lstm())
    told = examine(Calls(lambda m, x: (m.a(x)[0], m.b(x)[0]), a=first, b=second), stream)
    assert all("bias_hh_l0" not in name for f in told.audit.findings for name in f.into)
    assert {f.parameter for f in told.audit.findings} <= {"a.bias_hh_l0"}
    assert told.dof("DW017") == 4 * HIDDEN  # the shared one moves, and both others follow


def test_a_bias_that_is_returned_is_not_moved(examine: Callable, stream: Tensor) -> None:
    told = examine(Calls(lambda m, x: (m.a(x)[0], m.a.bias_ih_l0), a=lstm()), stream)
    assert not told.audit.findings
    told = examine(Calls(lambda m, x: (m.a(x)[0], m.a.bias_ih_l0[: 3 * HIDDEN]), a=lstm()), stream)
    assert told.dof("DW017") in (0, HIDDEN)


def test_a_part_of_a_bias_that_is_returned_keeps_its_other_part_free(examine: Callable, stream: Tensor) -> None:
    told = examine(Calls(lambda m, x: (m.a(x)[0], m.a.bias_hh_l0[2 * HIDDEN :]), a=gru()), stream)
    assert told.pieces("DW017", "a.bias_ih_l0") == [(0, 2 * HIDDEN)]


def test_a_layer_that_is_called_twice_has_one_pair_of_biases(examine: Callable, stream: Tensor) -> None:
    told = examine(Calls(lambda m, x: (m.a(x)[0], m.a(x.flip(1))[0]), a=gru()), stream)
    assert told.dof("DW017") == 2 * HIDDEN


def test_tied_biases_are_one_bias_that_counts_twice(examine: Callable, stream: Tensor) -> None:
    module = lstm()
    module.bias_hh_l0 = module.bias_ih_l0
    assert not examine(Chain(module), stream).audit.findings


def test_a_recurrent_weight_that_another_layer_reads_scales_nothing(examine: Callable, stream: Tensor) -> None:
    recurrent = rnn(nonlinearity="relu", bias=False)
    tail = nn.Linear(HIDDEN, HIDDEN, bias=False)
    tail.weight = recurrent.weight_hh_l0
    head = nn.Linear(HIDDEN, 2)
    told = examine(Calls(lambda m, x: m.head(m.tail(m.a(x)[0])), a=recurrent, tail=tail, head=head), stream)
    assert told.dof("DW011") == 0


def test_a_weight_that_a_recurrent_layer_reads_too_turns_for_no_other_reader(examine: Callable, stream: Tensor) -> None:
    first, norm, second = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
    chain = Calls(lambda m, x: (m.b(m.a(x)), m.c(x)[0]), a=first, b=second, c=lstm())
    normed = Calls(lambda m, x: (m.b(m.n(x[..., :1].tanh() * m.a(x))), m.c(x)[0]), a=first, b=second, c=lstm(), n=norm)
    assert examine(chain, stream).dof("DW019") == HIDDEN**2
    assert examine(normed, stream).dof("DW006") == 2 * HIDDEN
    second.weight = chain.c.weight_hh_l0
    assert examine(chain, stream).dof("DW019") == 0
    second.weight = normed.c.weight_hh_l0
    told = examine(normed, stream)
    assert told.dof("DW008") == 0 and not told.laws_of("n.weight")


def test_layers_that_share_their_recurrent_weight_are_audited_soundly(examine: Callable, stream: Tensor) -> None:
    for build in (lstm, gru, rnn):
        first, second = share("weight_hh_l0", *share("weight_ih_l0", build(), build()))
        told = examine(Calls(lambda m, x: (m.a(x)[0], m.b(x)[0]), a=first, b=second), stream)
        gates = len(first.bias_ih_l0) - (HIDDEN if build is gru else 0)
        assert told.dof("DW017") == told.audit.redundant == 2 * gates


def test_a_projected_state_that_is_given_or_returned_keeps_its_basis(examine: Callable, stream: Tensor) -> None:
    layer, head = lstm(proj_size=SMALL), nn.Linear(SMALL, 2)
    start = (torch.randn(1, 8, SMALL), torch.randn(1, 8, HIDDEN))
    given = Calls(lambda m, x: m.head(m.a(x, tuple(s.to(x.dtype) for s in start))[0]), a=layer, head=head)
    assert examine(given, stream).dof("DW019") == 0
    returned = Calls(lambda m, x: (m.head((h := m.a(x))[0]), h[1][0]), a=layer, head=head)
    assert examine(returned, stream).dof("DW019") == 0
    free = Calls(lambda m, x: (m.head((h := m.a(x))[0]), h[1][1]), a=layer, head=head)
    assert examine(free, stream).dof("DW019") == SMALL**2


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = [5, 3, 5, 4, 4, 3, 2, 1]
    rows = nn.utils.rnn.pack_padded_sequence(m.first(x), lengths, batch_first=True, enforce_sorted=False)
    return m.head(nn.utils.rnn.pad_packed_sequence(m.layer(rows)[0], batch_first=True)[0])


def test_packed_sequences_are_explained_to_the_last_dimension(stream: Tensor) -> None:
    first, head = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * HIDDEN, 2)
    model = Calls(packed, first=first, layer=gru(bidirectional=True), head=head)
    expected = {"DW017": 2 * 2 * HIDDEN + WIDTH, "DW019": WIDTH**2}
    assert by_law(accounted(model, stream)) == expected
    norm, head = nn.LayerNorm(WIDTH), nn.Linear(SMALL, 2)
    model = Calls(packed, first=norm, layer=lstm(proj_size=SMALL), head=head)
    expected = {"DW006": 2 * WIDTH, "DW008": 4 * HIDDEN, "DW017": 4 * HIDDEN, "DW019": SMALL**2}
    assert by_law(accounted(model, stream)) == expected


OPAQUE: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], set[str]]] = {
    "aten.bilinear": (lambda: nn.Bilinear(3, 2, 4), (torch.randn(6, 3), torch.randn(6, 2)), {"weight", "bias"}),
    "aten.embedding_bag": (lambda: nn.EmbeddingBag(5, 3, mode="max"), (torch.randint(0, 5, (4, 3)),), {"weight"}),
}


@pytest.mark.parametrize("op", OPAQUE)
def test_a_parameter_that_an_operation_without_a_rule_reads_is_named(op: str) -> None:
    build, inputs, names = OPAQUE[op]
    unknown = [u for u in deadweight.audit(build(), inputs).unknown if u.blocked_by == op]
    assert sorted(u.parameter for u in unknown) == sorted(names)
    assert all("not examined" in u.why for u in unknown)


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.PReLU()), (2, 3, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), (2, 5, 8)),
    "LSTM": (lstm, (2, STEPS, WIDTH)),
    "GRU": (gru, (2, STEPS, WIDTH)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_layers_have_a_rule_for_every_operation(name: str) -> None:
    build, shape = PLAIN[name]
    assert not [u for u in deadweight.audit(build(), (torch.randn(shape),)).unknown if "not examined" in u.why]
