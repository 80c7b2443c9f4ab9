"""Latent attention: keys are joined from two projections, and all heads share the rotary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deadweight
from deadweight.claims.contraction_claim import ContractionClaim
from deadweight.claims.turn_claim import TurnClaim

HEADS, PLAIN, ROTARY, LATENT, WIDTH = 2, 2, 2, 3, 8
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Latent(nn.Module):
    """Queries from one map; keys from a normed latent, head by head, and from a rotary part that all heads share.

    `spoil`: "key" reads the shared keys elsewhere too; "heads" gives each head's shared keys another frequency.
    """

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.spoil = spoil
        self.query = nn.Linear(WIDTH, HEADS * (PLAIN + ROTARY), bias=False)
        self.down = nn.Linear(WIDTH, LATENT + ROTARY, bias=False)
        self.up = nn.Linear(LATENT, HEADS * PLAIN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, shared = self.down(x).split([LATENT, ROTARY], -1)
        k = self.up(F.rms_norm(latent, (LATENT,), eps=0.1)).unflatten(-1, (HEADS, PLAIN)).transpose(1, 2)
        shared = shared[:, None].expand(-1, HEADS, -1, -1)
        q = torch.cat([q[..., :PLAIN], self.turned(q[..., PLAIN:])], -1)
        k = torch.cat([k, self.turned(shared)], -1)
        y = (q @ k.transpose(-1, -2)).softmax(-1)
        return y + shared.sum().tanh() if self.spoil == "key" else y

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(5, dtype=x.dtype)[:, None]
        rates = torch.tensor([1.0, 0.3], dtype=x.dtype)[:, None, None] if self.spoil == "heads" else 1.0
        cos, sin = torch.cos(angle * rates), torch.sin(angle * rates)
        a, b = x[..., :1], x[..., 1:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def of_kind(claims: list[Any], kind: type) -> list[Any]:
    return [c for c in claims if isinstance(c, kind)]


def test_plain_keys_turn_head_by_head_and_shared_ones_with_all_queries(true_claims: Callable[..., Any]) -> None:
    """GL(2) for each head, one complex number for the rotary part; and rotations of the normed latent."""
    graph, claims = true_claims(Latent(), X)
    (claim,) = of_kind(claims, ContractionClaim)
    assert claim.dof == HEADS * PLAIN**2 + 2
    names = {graph.parameters[n] for n in (claim.node, *claim.into)}
    assert names == {"query.weight", "down.weight", "up.weight"}
    turns = [c for c in of_kind(claims, TurnClaim) if c.rotations]
    assert [c.dof for c in turns] == [LATENT * (LATENT - 1) // 2]


@pytest.mark.parametrize("spoil", ["key", "heads"])
def test_shared_keys_that_are_read_elsewhere_or_differ_from_head_to_head_are_not_claimed(
    spoil: str, true_claims: Callable[..., Any]
) -> None:
    assert not of_kind(true_claims(Latent(spoil), X)[1], ContractionClaim)


def test_every_dimension_of_latent_attention_is_explained() -> None:
    torch.manual_seed(0)
    account = deadweight.audit(Latent(), (X.float(),), complete=True).completeness
    assert account is not None and not account.unsound and account.measured == account.explained
