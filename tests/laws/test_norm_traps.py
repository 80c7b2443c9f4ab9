"""Norms, streams, hidden units and tables: each law's exact reach, and the neighbour where it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight
import deadweight.audit.run
from deadweight.audit.clone_measurements import Measured

WIDTH, HIDDEN, VOCABULARY = 8, 12, 11


@pytest.fixture
def stream() -> Tensor:
    return torch.randn(2, 5, WIDTH)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 5))


class Lambda(nn.Module):
    """A forward function over named parts."""

    def __init__(self, forward: Callable, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, *inputs)


def vector(size: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.randn(size))


class OffsetRMSNorm(nn.Module):
    """Stores γ − 1, as Gemma does, and normalises in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = vector()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)).type_as(x)


def residual(norm: Callable[[], nn.Module], *, tied: bool = False) -> nn.Module:
    """Tokens, one pre-norm feed-forward block, a final norm and a readout."""

    def forward(m: Lambda, tokens: Tensor) -> Tensor:
        x = m.table(tokens)
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        return F.linear(m.final(x), m.table.weight) if tied else m.readout(m.final(x))

    parts = {"readout": nn.Linear(WIDTH, VOCABULARY)} if not tied else {}
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    return Lambda(forward, table=nn.Embedding(VOCABULARY, WIDTH), norm=norm(), up=up, down=down, final=norm(), **parts)


def layer_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def rms_norm() -> nn.Module:
    return nn.RMSNorm(WIDTH, eps=1e-6)


def test_layernorm_ignores_the_mean_of_every_writer(examine: Callable, tokens: Tensor) -> None:
    told = examine(residual(layer_norm), tokens)
    for name, dof in {"table.weight": VOCABULARY, "down.weight": HIDDEN, "down.bias": 1}.items():
        assert [f.dof for f in told.found("DW005", name)] == [dof]
    assert not told.found("DW005", "up.bias")


@pytest.mark.parametrize("norm", [rms_norm, OffsetRMSNorm])
def test_rmsnorm_ignores_no_mean(examine: Callable, tokens: Tensor, norm: Callable) -> None:
    assert examine(residual(norm), tokens).dof("DW005") == 0


@pytest.mark.parametrize("norm", [layer_norm, rms_norm, OffsetRMSNorm])
def test_a_gain_folds_into_linear_readers(examine: Callable, tokens: Tensor, norm: Callable) -> None:
    told = examine(residual(norm), tokens)
    for name in ("norm.weight", "final.weight"):
        assert [f.dof for f in told.found("DW006", name)] == [WIDTH]


def test_a_tied_readout_keeps_the_final_gain_and_the_rows_of_the_table(examine: Callable, tokens: Tensor) -> None:
    told = examine(residual(layer_norm, tied=True), tokens)
    assert not told.found("DW006", "final.weight")
    assert not told.laws_of("table.weight") & {"DW005", "DW012"}
    assert told.found("DW006", "norm.weight") and told.found("DW005", "down.bias")


def test_a_norm_shift_that_two_readers_share_folds_only_where_both_take_it(examine: Callable, stream: Tensor) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        normed = m.norm(x)
        return m.left(normed) * torch.tanh(m.right(normed))

    def build(*, bias: bool) -> nn.Module:
        return Lambda(forward, norm=layer_norm(), left=nn.Linear(WIDTH, 6), right=nn.Linear(WIDTH, 6, bias=bias))

    assert examine(build(bias=True), stream).found("DW006", "norm.bias")
    folded = examine(build(bias=False), stream).found("DW006", "norm.bias")
    assert all("right.weight" in f.into for f in folded)


def test_layerscale_turns_the_dead_direction(examine: Callable, stream: Tensor) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return m.readout(m.final(x + m.scale * m.down(torch.tanh(x))))

    def build(final: nn.Module) -> nn.Module:
        return Lambda(
            forward, scale=vector(), down=nn.Linear(WIDTH, WIDTH), final=final, readout=nn.Linear(WIDTH, WIDTH)
        )

    model = build(layer_norm())
    told = examine(model, stream)
    (found,) = told.found("DW005", "down.bias")
    assert found.dof == 1 and "1/" in found.note
    assert [f.dof for f in told.found("DW005", "down.weight")] == [WIDTH]
    model = model.double()
    gradient = torch.autograd.grad(model(stream.double()).square().sum(), [model.down.bias])[0]
    assert abs(float((gradient / model.scale).sum())) < 1e-10 * float(gradient.abs().max()) * WIDTH
    assert abs(float(gradient.sum())) > 1e-4 * float(gradient.abs().max())
    assert not examine(build(rms_norm()), stream).found("DW005", "down.bias")


def test_a_second_linear_map_ends_the_reach_of_layerscale(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return m.readout(m.final(x + m.scale * m.second(m.first(x))))

    monkeypatch.setattr(deadweight.audit.run, "measure", lambda *_, **__: Measured())  # proofs alone
    parts = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "readout")}
    model = Lambda(forward, scale=vector(), final=layer_norm(), **parts)
    found = deadweight.audit(model, torch.randn(2, 5, WIDTH)).findings
    assert not [f for f in found if f.code == "DW005" and f.parameter.startswith("first")]
    assert [f for f in found if f.code == "DW005" and f.parameter.startswith("second")]


def convolution(norm: nn.Module) -> nn.Module:
    return Lambda(lambda m, x: torch.tanh(m.norm(m.conv(x))), conv=nn.Conv1d(3, 6, 3), norm=norm)


def test_batchnorm_in_eval_takes_the_bias_over(examine: Callable) -> None:
    told = examine(convolution(nn.BatchNorm1d(6)), torch.randn(4, 3, 9))
    (found,) = told.found("DW004", "conv.bias")
    assert (found.verdict, found.tier, found.into) == ("folds", "mode", ("norm.bias",))


def test_batchnorm_on_batch_statistics_makes_the_bias_dead(examine: Callable) -> None:
    told = examine(convolution(nn.BatchNorm1d(6)), torch.randn(4, 3, 9), training=True)
    (found,) = told.found("DW004", "conv.bias")
    assert (found.verdict, found.tier, found.dof) == ("dead", "mode", 6) and "training" in found.note


def test_the_whole_batchnorm_folds_in_eval_only(examine: Callable) -> None:
    told = examine(convolution(nn.BatchNorm1d(6)), torch.randn(4, 3, 9))
    (found,) = told.found("DW004", "norm.weight")
    assert (found.verdict, found.tier, found.dof) == ("folds", "mode", 6)
    assert found.into == ("conv.weight", "conv.bias", "norm.bias")
    assert not examine(convolution(nn.BatchNorm1d(6)), torch.randn(4, 3, 9), training=True).found(
        "DW004", "norm.weight"
    )


def test_a_batchnorm_does_not_fold_where_its_input_is_read_again(examine: Callable) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        y = m.conv(x)
        return torch.tanh(m.norm(y)) + torch.sin(y)

    told = examine(Lambda(forward, conv=nn.Conv1d(3, 6, 3), norm=nn.BatchNorm1d(6)), torch.randn(4, 3, 9))
    assert not told.found("DW004", "norm.weight")


@pytest.mark.parametrize(("between", "folds"), [(lambda y: y, True), (torch.tanh, False)])
def test_layerscale_folds_into_the_linear_map_before_it(
    examine: Callable, stream: Tensor, between: Callable, folds: bool
) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return torch.tanh(x + m.scale * between(m.down(torch.tanh(x))))

    told = examine(Lambda(forward, scale=vector(), down=nn.Linear(WIDTH, WIDTH)), stream)
    assert [(f.dof, f.into) for f in told.found("DW011", "scale")] == [(WIDTH, ("down.weight", "down.bias"))] * folds


def test_groupnorm_makes_only_the_mean_of_each_group_dead(examine: Callable) -> None:
    told = examine(convolution(nn.GroupNorm(2, 6)), torch.randn(4, 3, 9))
    assert [f.dof for f in told.found("DW004", "conv.bias")] == [2] and not told.dead("conv.bias")


def test_instancenorm_makes_the_whole_bias_dead(examine: Callable) -> None:
    told = examine(convolution(nn.InstanceNorm1d(6, affine=True)), torch.randn(4, 3, 9))
    assert told.dead("conv.bias") and not told.dead("norm.bias")


def test_of_parallel_biases_only_the_sum_counts(examine: Callable, stream: Tensor) -> None:
    def parallel(m: Lambda, x: Tensor) -> Tensor:
        return torch.tanh(x + m.left(torch.sin(x)) + m.right(torch.cos(x)))

    def serial(m: Lambda, x: Tensor) -> Tensor:
        return torch.tanh(x + m.right(torch.tanh(m.left(x))))

    parts = {"left": nn.Linear(WIDTH, WIDTH), "right": nn.Linear(WIDTH, WIDTH)}
    found = [f for f in examine(Lambda(parallel, **parts), stream).audit.findings if f.code == "DW017"]
    assert [(f.dof, f.parameter, f.into) for f in found] == [(WIDTH, "left.bias", ("right.bias",))]
    assert examine(Lambda(serial, **parts), stream).dof("DW017") == 0


@pytest.mark.parametrize(("gate", "dead"), [(torch.softmax, True), (lambda x, _: torch.sigmoid(x), False)])
def test_a_softmax_router_ignores_the_mean_over_experts(
    examine: Callable, stream: Tensor, gate: Callable, dead: bool
) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        experts = torch.stack([e(x) for e in m.experts], -1)
        return torch.einsum("...de,...e->...d", torch.tanh(experts), gate(m.router(x), -1))

    experts = nn.ModuleList([nn.Linear(WIDTH, 4) for _ in range(3)])
    told = examine(Lambda(forward, router=nn.Linear(WIDTH, 3), experts=experts), stream)
    assert [f.dof for f in told.found("DW018", "router.weight")] == [WIDTH] * dead
    assert [f.dof for f in told.found("DW018", "router.bias")] == [1] * dead


def test_logits_may_shift_only_where_probabilities_are_read(examine: Callable, stream: Tensor) -> None:
    model = Lambda(lambda m, x: m.readout(torch.tanh(x)), readout=nn.Linear(WIDTH, 5))
    assert examine(model, stream).dof("DW016") == 0
    told = examine(model, stream, output="probabilities")
    assert [f.dof for f in told.found("DW016", "readout.weight")] == [WIDTH]
    assert [f.dof for f in told.found("DW016", "readout.bias")] == [1]


def test_a_mean_that_dies_before_the_logits_is_no_shift_of_the_logits(examine: Callable, stream: Tensor) -> None:
    parts = {"up": nn.Linear(WIDTH, WIDTH), "readout": nn.Linear(WIDTH, 5)}
    model = Lambda(lambda m, x: m.readout(torch.tanh(F.layer_norm(x + m.up(x), (WIDTH,)))), **parts)
    told = examine(model, stream, output="probabilities")
    assert (told.laws_of("up.bias"), told.laws_of("readout.bias")) == ({"DW005"}, {"DW016"})


@pytest.mark.parametrize(("activation", "units"), [(F.relu, HIDDEN), (F.leaky_relu, HIDDEN), (F.gelu, 0), (F.silu, 0)])
def test_only_homogeneous_units_have_a_free_scale(
    examine: Callable, stream: Tensor, activation: Callable, units: int
) -> None:
    parts = {"up": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)}
    told = examine(Lambda(lambda m, x: m.down(activation(m.up(x))), **parts), stream)
    assert told.dof("DW011") == units


def test_only_the_linear_branch_of_a_gated_unit_has_a_free_scale(examine: Callable, stream: Tensor) -> None:
    parts = {name: nn.Linear(WIDTH, HIDDEN, bias=False) for name in ("up", "gate")}
    parts["down"] = nn.Linear(HIDDEN, WIDTH, bias=False)
    told = examine(Lambda(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **parts), stream)
    assert told.dof("DW011") == HIDDEN and told.found("DW011", "up.weight") and not told.found("DW011", "gate.weight")


def test_unused_parameters_are_dead_and_read_ones_are_not(examine: Callable, stream: Tensor) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = m.silent * 2
        return torch.tanh(m.used(x) + shift)

    told = examine_without_gradients(forward)
    assert {f.parameter for f in told.findings if f.code == "DW001"} == {"unused.weight", "unused.bias"}


def examine_without_gradients(forward: Callable) -> deadweight.Audit:
    """A parameter read under no_grad has no gradient and is read: autograd cannot judge it."""
    used, unused = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2)
    return deadweight.audit(Lambda(forward, used=used, unused=unused, silent=vector()), torch.randn(2, 5, WIDTH))


def test_rows_of_a_position_table_that_a_longer_sequence_reads_are_not_unused() -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return torch.tanh(x + m.positions(torch.arange(x.shape[1])))

    model = Lambda(forward, positions=nn.Embedding(2048, WIDTH))
    found = deadweight.audit(model, torch.randn(2, 5, WIDTH)).findings
    assert not [f for f in found if f.code == "DW001"]


def test_rows_below_an_offset_are_unused(examine: Callable, stream: Tensor) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return torch.tanh(x + m.positions(torch.arange(x.shape[1]) + 2))

    told = examine(Lambda(forward, positions=nn.Embedding(64, WIDTH)), stream)
    assert told.pieces("DW001", "positions.weight")[0][0] == 0
    assert told.found("DW001", "positions.weight")[0].slice == ((0, 2),)


def test_an_unbatched_convolution_keeps_its_channels_on_the_first_axis() -> None:
    model = Lambda(lambda m, x: torch.softmax(m.conv(x), 0), conv=nn.Conv1d(8, 8, 1))
    found = deadweight.audit(model, torch.randn(8, 8)).findings
    assert not [f for f in found if f.parameter == "conv.bias" and f.dof > 1]


def test_a_gain_inside_each_head_is_passed_by_the_value_basis(examine: Callable, stream: Tensor) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (m.q(x), m.k(x), m.v(x))]
        mixed = torch.softmax(heads[0] @ heads[1].transpose(-1, -2), -1) @ heads[2]
        return m.o((mixed * m.gain).transpose(1, 2).flatten(-2))

    parts = {name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"}
    assert examine(Lambda(forward, gain=vector(4), **parts), stream).found("DW003", "v.bias")


def test_a_parameter_of_one_number_that_nothing_reads_is_unused(examine: Callable) -> None:
    told = examine(
        Lambda(lambda m, x: m.linear(x), linear=nn.Linear(4, 3), scale=nn.Parameter(torch.tensor(2.0))),
        torch.randn(2, 4),
    )
    assert [f.dof for f in told.found("DW001", "scale")] == [1]


def test_a_short_vector_added_to_a_wide_value_is_no_bias_of_its_channels(examine: Callable) -> None:
    def forward(m: Lambda, x: Tensor) -> Tensor:
        return m.second(torch.relu(m.first(x) + m.shift))

    parts = {"first": nn.Conv1d(3, 6, 1), "second": nn.Conv1d(6, 2, 1), "shift": nn.Parameter(torch.randn(5))}
    told = examine(Lambda(forward, **parts), torch.randn(2, 3, 5))
    assert not told.found("DW017", "shift") and not told.found("DW017", "first.bias")
