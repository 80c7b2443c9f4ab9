"""Idioms of people's own code: heads as an axis of the weights, −1e9 as a mask, pruned weights, stacked ensembles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrize, prune

import deadweight

X = torch.randn(2, 4, 6)
CAUSAL = torch.tril(torch.ones(4, 4)) == 0


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.3)


class Heads(nn.Module):
    """Attention by einsum, with an axis for the heads in every weight and bias."""

    def __init__(self, fill: float = -torch.inf) -> None:
        super().__init__()
        self.fill = fill
        self.q, self.k, self.v, self.o = (
            parameter(2, 6, 3),
            parameter(2, 6, 3),
            parameter(2, 6, 3),
            parameter(2, 3, 6),
        )
        self.bq, self.bk, self.bv, self.bo = parameter(2, 3), parameter(2, 3), parameter(2, 3), parameter(6)

    def forward(self, x: Tensor) -> Tensor:
        pairs = ((self.q, self.bq), (self.k, self.bk), (self.v, self.bv))
        q, k, v = (torch.einsum("btd,hdk->bthk", x, w) + b for w, b in pairs)
        scores = torch.einsum("bthk,bshk->bhts", q, k).masked_fill(CAUSAL, self.fill)
        mixed = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)
        return torch.einsum("bthk,hkd->btd", mixed, self.o) + self.bo


def test_heads_as_an_axis_of_the_weights_are_explained_to_the_last_dimension(examine) -> None:
    result = examine(Heads(), X, complete=True)
    counted = result.audit.completeness
    assert counted.measured == counted.explained == 6 + 6 + 2 * 9 + 2 * 9
    assert result.dead("bk")
    (turn,) = result.found("DW009", "k")
    assert (turn.slice, turn.elements, turn.dof, turn.into) == (None, 36, 18, ("q", "bq", "bk"))


@pytest.mark.parametrize("fill", [-1e4, -1e9, -9e15])
def test_a_low_number_masks_as_minus_infinity_does_and_the_finding_says_so(examine, fill: float) -> None:
    result = examine(Heads(fill), X)
    (dead,) = result.found("DW002", "bk")
    assert f"{fill:g} counts as −∞" in dead.note


def test_a_number_that_scores_may_reach_masks_nothing(examine) -> None:
    result = examine(Heads(-100.0), X)
    assert result.dof("DW002") == 0 and result.blockers("bk")


class Scores(nn.Module):
    """What reads the scores returns how low the masked ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax((self.q(x) @ self.k(x).mT).masked_fill(CAUSAL, -1e9), -1)


def test_a_key_bias_behind_a_mask_of_a_log_softmax_is_alive(examine) -> None:
    assert examine(Scores(), X).dof("DW002") == 0


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def test_what_triu_leaves_out_is_dead(true_claims) -> None:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    module = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3))
    assert masked_and_counted(module) == (15, 15, 15)
    true_claims(module, X.double())
    before = module(X.double())
    with torch.no_grad():
        layer.parametrizations.weight.original.add_(torch.full((6, 6), 3.0).tril(-1))
    torch.testing.assert_close(module(X.double()), before)


def masked_and_counted(module: nn.Module) -> tuple[int, int, int]:
    """The dead elements that a mask hides; all redundant dimensions that were measured; and those explained."""
    result = deadweight.audit(module, (X,), complete=True)
    counted = result.completeness
    return sum(f.dof for f in result.findings if f.code == "DW001"), counted.measured, counted.explained


class Masked(nn.Module):
    def __init__(self, read_whole: bool) -> None:
        super().__init__()
        self.w, self.read_whole = parameter(5, 6), read_whole
        self.register_buffer("mask", (torch.arange(30).reshape(5, 6) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(x @ (self.w * self.mask).T)
        return out * self.w.sum() if self.read_whole else out


def test_what_a_mask_multiplies_by_zero_is_dead(true_claims) -> None:
    module = Masked(False)
    assert masked_and_counted(module) == (10, 10, 10)
    true_claims(module, X.double())
    before = module(X.double())
    with torch.no_grad():
        module.w.add_(3.0 * (module.mask == 0))
    torch.testing.assert_close(module(X.double()), before)


def test_a_mask_is_silent_about_a_weight_that_is_read_without_it_too(examine) -> None:
    assert examine(Masked(True), X).dof("DW001") == 0


def test_pruned_weights_are_dead() -> None:
    layer = nn.Linear(6, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    result = deadweight.audit(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)), (X,))
    assert [(f.parameter, f.dof) for f in result.findings if f.code == "DW001"] == [("0.weight_orig", 12)]


class Stacked(nn.Module):
    """Three small networks in stacked matrices: as bmm, or by vmap."""

    def __init__(self, by_vmap: bool, act: nn.Module) -> None:
        super().__init__()
        self.by_vmap, self.act = by_vmap, act
        self.w1, self.b1, self.w2, self.b2 = parameter(3, 5, 4), parameter(3, 5), parameter(3, 2, 5), parameter(3, 2)
        self.one = [nn.Sequential(nn.Linear(4, 5), act, nn.Linear(5, 2)).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        if self.by_vmap:
            values = {"0.weight": self.w1, "0.bias": self.b1, "2.weight": self.w2, "2.bias": self.b2}
            return vmap(lambda p, y: functional_call(self.one[0], p, (y,)), in_dims=(0, None))(values, x)
        hidden = torch.baddbmm(self.b1[:, None], x.expand(3, *x.shape), self.w1.mT)
        return torch.baddbmm(self.b2[:, None], self.act(hidden), self.w2.mT)


@pytest.mark.parametrize("by_vmap", [False, True])
def test_every_unit_of_every_member_of_an_ensemble_has_a_scale(examine, by_vmap: bool) -> None:
    result = examine(Stacked(by_vmap, nn.ReLU()), torch.randn(7, 4), complete=True)
    assert result.dof("DW011") == 15
    assert result.audit.completeness.measured == result.audit.completeness.explained == 15


def test_an_ensemble_with_tanh_has_no_scales(examine) -> None:
    assert examine(Stacked(False, nn.Tanh()), torch.randn(7, 4)).dof("DW011") == 0


class Gated(nn.Module):
    """All experts by einsum: the third operand is the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.route = (
            parameter(3, 6, 4),
            parameter(3, 6, 4),
            parameter(3, 4, 6),
            parameter(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(torch.einsum("btd,edf->btef", x, self.gate)) * torch.einsum(
            "btd,edf->btef", x, self.up
        )
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, torch.sigmoid(x @ self.route))


def test_hidden_units_of_experts_in_one_einsum_have_scales(examine) -> None:
    result = examine(Gated(), X, complete=True)
    assert result.dof("DW011") == 12
    assert result.audit.completeness.measured == result.audit.completeness.explained


class Joined(nn.Module):
    """Three tokens side by side, a bias of its own for each, and one linear map."""

    def __init__(self, interleaved: bool, shared: bool = False) -> None:
        super().__init__()
        self.table, self.bias, self.read = nn.Embedding(11, 4), parameter(12), nn.Linear(12, 5)
        self.interleaved, self.shared = interleaved, shared

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        joined = (rows.mT if self.interleaved else rows).flatten(-2) + self.bias
        return self.read(joined) + (self.bias.sum() if self.shared else 0.0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_bias_on_vectors_side_by_side_turns_vector_by_vector(true_claims, examine, interleaved: bool) -> None:
    ids = torch.randint(0, 11, (40, 3), generator=torch.Generator().manual_seed(0))
    result = examine(Joined(interleaved), ids, complete=True)
    assert result.audit.completeness.measured == result.audit.completeness.explained == 12 + 4 + 16
    _, claims = true_claims(Joined(interleaved), ids)
    assert any(claim.code == "DW019" for claim in claims)


def test_no_turn_where_the_bias_is_read_elsewhere_too(examine) -> None:
    assert examine(Joined(False, shared=True), torch.randint(0, 11, (4, 3))).dof("DW019") == 0
