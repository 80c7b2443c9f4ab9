"""Over a thousand positions, labels of all pairs of them are not written, and the verdicts are those of a few."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.trace import trace
from deadweight.laws.catalogue import search
from deadweight.proof.identity_labels import LARGE
from deadweight.proof.labels import compact

WIDTH, FEW, MANY = 3, 5, 1100  # 1100² pairs are more than LARGE


class Attention(nn.Module):
    """One head; `score` says how queries and keys meet, `weigh` what is made of the scores."""

    def __init__(self, score: Callable[..., Tensor], weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self.score, self.weigh = score, weigh

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.o(self.weigh(self.score(self, self.q(x), self.k(x))) @ self.v(x)))


def dot(m: Attention, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.5


def masked(m: Attention, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 2 + torch.full((q.shape[1], q.shape[1]), -torch.inf, dtype=q.dtype).triu(1)


def cancelled(m: Attention, q: Tensor, k: Tensor) -> Tensor:
    return (q + m.offset) @ k.mT - m.offset @ k.mT  # the offset is dead, though it differs from key to key in between


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


CASES = {
    "softmax": (dot, softmax),
    "a causal mask": (masked, softmax),
    "a shift that is taken back": (cancelled, softmax),
    "softmax over queries": (dot, lambda scores: scores.softmax(-2)),
    "no softmax": (dot, torch.sigmoid),
    "scores as they are": (dot, lambda scores: scores),
}


def verdicts(module: nn.Module, positions: int) -> tuple[dict[tuple[str, str, str], int], int]:
    """What is claimed of each parameter, and the largest number of labels kept."""
    x = torch.randn(1, positions, WIDTH, generator=torch.Generator().manual_seed(0))
    graph = canonical(trace(module.eval(), (x,)))
    prover = search(graph)
    kept = [compact(labels).numel() for labels in prover.identity.known.values() if isinstance(labels, Tensor)]
    return {(c.code, graph.parameters[c.node], c.verdict): c.dof for c in prover.claims}, max(kept, default=0)


@pytest.mark.parametrize(("score", "weigh"), CASES.values(), ids=list(CASES))
def test_many_positions_have_the_verdicts_of_a_few(score: Callable, weigh: Callable) -> None:
    module = Attention(score, weigh)
    (few, _), (many, _) = verdicts(module, FEW), verdicts(module, MANY)
    assert many == few and few


def test_no_label_is_kept_for_each_pair_of_positions() -> None:
    assert MANY**2 > LARGE
    assert verdicts(Attention(dot, softmax), MANY)[1] <= WIDTH * MANY * 4
