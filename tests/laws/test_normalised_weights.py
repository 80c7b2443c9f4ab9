"""Weights that are normalised before use, rows beside the keys, and bags of embeddings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(4, 5)
TOKENS = torch.randint(0, 11, (3, 5))
new, old = nn.utils.parametrizations, nn.utils


class Cosine(nn.Module):
    """A classifier of normalised weights; the weight may be read elsewhere too."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.randn(3, 5)), extra

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ (self.weight / self.weight.norm(dim=1, keepdim=True)).T
        return scores + self.weight.sum() if self.extra else scores


class Standardised(nn.Conv1d):
    """A convolution whose rows have mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, eps=1e-5).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias).tanh()


def run_once(module: nn.Module, *inputs: Tensor) -> nn.Module:
    """The older weight norm keeps the weight it computed last: without a gradient, the module can be copied."""
    with torch.no_grad():
        module(*inputs)
    return module


@pytest.mark.parametrize("norm", [new.weight_norm, old.weight_norm])
def test_the_length_of_a_row_is_redundant_under_weight_norm(examine: Callable, norm: Callable) -> None:
    told = examine(run_once(nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 3))), X), X)
    assert [(f.code, f.tier, f.dof) for f in told.audit.findings] == [("DW014", "real", 6), ("DW014", "real", 3)]
    assert not told.audit.unknown


def test_weight_norm_over_another_axis_has_one_length_for_each_of_its_indices(examine: Callable) -> None:
    for axis, lengths in ((0, 6), (1, 5), (None, 1)):
        module = nn.Sequential(old.weight_norm(nn.Linear(5, 6), dim=axis), nn.Tanh())
        assert examine(run_once(module, X), X).dof("DW014") == lengths


@pytest.mark.parametrize("norm", [new.spectral_norm, old.spectral_norm])
def test_the_scale_of_a_weight_is_redundant_under_spectral_norm(examine: Callable, norm: Callable) -> None:
    told = examine(nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh()), X)
    assert [(f.code, f.tier, f.dof) for f in told.audit.findings] == [("DW014", "real", 1)]


def test_a_normalised_weight_that_is_read_elsewhere_keeps_its_length(examine: Callable) -> None:
    assert examine(Cosine(), X).dof("DW014") == 3
    assert not examine(Cosine(extra=True), X).audit.findings


def test_a_standardised_weight_has_a_dead_mean_and_a_scale_in_every_row(examine: Callable) -> None:
    told = examine(Standardised(5, 4, 2), torch.randn(2, 5, 6))
    assert {(f.code, f.tier, f.dof) for f in told.audit.findings} == {("DW004", "real", 4), ("DW014", "epsilon", 4)}
    notes = [f.note for f in told.audit.findings if f.code == "DW014"]
    assert notes == ["the norm's ε of 1e-05 is taken for 0"]
    cosine = examine(Cosine(), X).audit.findings
    assert [f.note for f in cosine] == ["the length of a weight that is divided by its own norm"]


class Attention(nn.Module):
    """nn.MultiheadAttention on one sequence, its output alone."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


ROWS = ("add_bias_kv", "add_zero_attn")


@pytest.mark.parametrize("option", ROWS)
def test_a_row_beside_keys_and_values_leaves_both_bases_free(examine: Callable, option: str) -> None:
    told = examine(Attention(**{option: True}), torch.randn(2, 5, 4))
    assert (told.dof("DW009"), told.dof("DW010")) == (8, 8)
    moved = {name for f in told.audit.findings for name in f.into}
    assert ("attention.bias_k" in moved) == ("attention.bias_v" in moved) == (option == "add_bias_kv")


@pytest.mark.parametrize("option", ROWS)
def test_a_row_beside_keys_and_values_keeps_their_biases_alive(examine: Callable, option: str) -> None:
    told = examine(Attention(**{option: True}), torch.randn(2, 5, 4))
    assert not told.dof("DW002") and not told.dof("DW003")
    assert "a key that is not shifted stands beside" in told.reasons("attention.in_proj_bias")
    plain = examine(Attention(), torch.randn(2, 5, 4))
    assert (plain.dof("DW002"), plain.dof("DW003")) == (4, 4)


class Shared(nn.Module):
    """A learned key that the output reads too."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.q, self.k, self.row = nn.Linear(4, 3), nn.Linear(4, 3), nn.Parameter(torch.randn(1, 3))
        self.returned = returned

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.q(x) @ torch.cat([self.k(x), self.row]).T
        return (scores, self.row.sum()) if self.returned else (scores,)


def test_a_learned_key_that_is_read_elsewhere_does_not_turn(examine: Callable) -> None:
    assert examine(Shared(returned=False), torch.randn(6, 4)).dof("DW009") == 9
    assert not examine(Shared(returned=True), torch.randn(6, 4)).dof("DW009")


class Bag(nn.Module):
    def __init__(self, between: nn.Module | None = None, **options: object) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(11, 3, **options), nn.Linear(3, 4)
        self.between = between or nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.between(self.embed(tokens)))


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_a_bag_of_embeddings_and_its_reader_share_a_basis(examine: Callable, mode: str) -> None:
    assert examine(Bag(mode=mode), TOKENS).dof("DW019") == 9
    assert not examine(Bag(nn.Tanh(), mode=mode), TOKENS).audit.findings


def test_the_largest_of_a_bag_is_no_linear_map(examine: Callable) -> None:
    assert not examine(Bag(mode="max"), TOKENS).audit.findings
