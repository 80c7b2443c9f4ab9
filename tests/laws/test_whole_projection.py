"""A whole projection becomes the identity: only without norms, and only for the skip connections that allow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, VOCABULARY = 4, 6, 11
TOKENS = torch.randint(0, VOCABULARY, (2, 5))


class Layer(nn.Module):
    """Attention and a feed-forward half, each with or without a skip connection."""

    def __init__(self, *, skips: tuple[bool, bool], norm: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6) if norm else nn.Identity()
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        attended = torch.softmax(self.query(y) @ self.key(y).mT, -1) @ self.value(y)
        x = self.output(attended) + x if self.skips[0] else self.output(attended)
        fed = self.down(F.gelu(self.up(self.norm(x))))
        return fed + x if self.skips[1] else fed


class Transformer(nn.Module):
    def __init__(
        self, layers: int, skips: tuple[bool, bool], *, shared: bool = False, norm: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        first = Layer(skips=skips, norm=norm)
        others = [first if shared else Layer(skips=skips, norm=norm) for _ in range(layers - 1)]
        self.layers = nn.ModuleList([first, *others])
        self.readout = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.readout.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


BOTH, ATTENTION_ONLY = (True, True), (True, False)
FREE = {
    "one layer, both skips": ((1, BOTH), {}),
    "a skip around attention only": ((2, ATTENTION_ONLY), {}),
    "shared weights, both skips": ((2, BOTH), {"shared": True}),
}
FIXED = {
    "a norm": ((1, BOTH), {"norm": True}),
    "a norm, attention skips only": ((2, ATTENTION_ONLY), {"norm": True}),
    "a tied readout": ((1, BOTH), {"tied": True}),
}


@pytest.mark.parametrize(("arguments", "options"), FREE.values(), ids=list(FREE))
def test_a_projection_becomes_the_identity(examine: Callable, arguments: tuple, options: dict) -> None:
    told = examine(Transformer(*arguments, **options), TOKENS)
    claims = [f for f in told.audit.findings if f.code == "DW015"]
    assert claims and all(f.dof == WIDTH**2 and "identity" in f.note for f in claims)
    assert told.found("DW015", "layers.0.query.weight")


def test_without_a_skip_around_the_feed_forward_every_layer_loses_a_projection(examine: Callable) -> None:
    told = examine(Transformer(2, ATTENTION_ONLY), TOKENS)
    assert told.found("DW015", "layers.0.query.weight") and told.found("DW015", "layers.1.query.weight")


def test_unshared_layers_with_both_skips_share_one_turn(examine: Callable) -> None:
    told = examine(Transformer(2, BOTH), TOKENS)
    assert told.dof("DW015") == WIDTH**2


@pytest.mark.parametrize(("arguments", "options"), FIXED.values(), ids=list(FIXED))
def test_no_projection_is_lost(examine: Callable, arguments: tuple, options: dict) -> None:
    assert examine(Transformer(*arguments, **options), TOKENS).dof("DW015") == 0
