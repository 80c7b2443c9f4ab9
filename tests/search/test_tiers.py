"""What a claim says beside its count: how exact it is, in which mode it holds, and which parameters follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn, softmax, tanh

from deadweight.laws.catalogue import every_law
from deadweight.rewrite.rewrite import NotDone

from .parts import X, Y


@pytest.mark.parametrize(("eps", "tier"), [(0.0, "real"), (1e-12, "epsilon")])
def test_a_normalised_weight_says_whether_its_norm_has_an_epsilon(census: Callable, eps: float, tier: str) -> None:
    unit = lambda m, x: tanh(F.linear(x, F.normalize(m.w, dim=1, eps=eps)))  # noqa: E731
    (claim,) = census(unit, X, w=torch.randn(3, 4)).claims
    assert (claim.tier, claim.epsilon) == (tier, eps)
    assert claim.note == (
        "the norm's ε of 1e-12 is taken for 0" if eps else "the length of a weight that is divided by its own norm"
    )


def bias_before(census: Callable, norm: nn.Module, *, training: bool) -> tuple[str, str, str]:
    found = census(lambda m, y: tanh(m.n(m.c(y))), Y, training=training, c=nn.Conv1d(4, 6, 1), n=norm)
    (claim,) = [c for c in found.claims if found.graph.parameters[c.node] == "c.bias"]
    return claim.verdict, claim.tier, claim.note


def test_a_bias_before_statistics_says_in_which_mode_it_is_redundant(census: Callable) -> None:
    assert bias_before(census, nn.BatchNorm1d(6), training=False) == ("folds", "mode", "eval: running statistics")
    assert bias_before(census, nn.BatchNorm1d(6), training=True) == ("dead", "mode", "training: batch statistics")
    assert bias_before(census, nn.InstanceNorm1d(6), training=False) == ("dead", "real", "")


def test_queries_follow_their_keys_and_nothing_else_does(census: Callable) -> None:
    found = census(
        lambda m, x: softmax(m.q(x) @ m.k(x).mT, -1) @ x, X, q=nn.Linear(4, 4, bias=False), k=nn.Linear(4, 4)
    )
    (claim,) = [c for c in found.claims if c.code == "DW009"]
    assert found.graph.parameters[claim.node] == "k.weight"
    assert {found.graph.parameters[n] for n in claim.into} == {"q.weight", "k.bias"}


def test_a_law_that_gains_nothing_in_the_stock_layout_is_not_carried_out_there(census: Callable) -> None:
    found = census(lambda m, x: tanh(m.a(F.layer_norm(x, (4,)))), X, a=nn.Linear(4, 3))
    (claim,) = found.claims
    law = every_law().law_of(claim)
    law.rewrite(found.graph, claim, stock=False)
    with pytest.raises(NotDone, match="stock layout"):
        law.rewrite(found.graph, claim, stock=True)


def test_a_proof_for_training_is_not_carried_out(census: Callable) -> None:
    found = census(lambda m, x: tanh(m.a(x) + m.b), X, training=True, a=nn.Linear(4, 3), b=torch.randn(3))
    with pytest.raises(NotDone, match="training"):
        every_law().law_of(found.claims[0]).rewrite(found.graph, found.claims[0], stock=False)
