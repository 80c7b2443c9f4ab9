"""einsum spelled out is the same function, and its parts are what the rules know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deadweight.graph.canonical import canonical
from deadweight.graph.einsum import spell_out_einsum
from deadweight.graph.trace import trace

SIZES = {"b": 2, "h": 3, "i": 4, "j": 5, "d": 6, "e": 7}
EQUATIONS = [
    "bid,bjd->bij",
    "bij,bjd->bid",
    "bid,bjd->bji",
    "bhid,bhjd->bhij",
    "bihd,bjhd->bhij",
    "bhij,bjhd->bihd",
    "bid,de->bie",
    "bid,ed->bie",
    "de,bid->bie",
    "bihd,hde->bie",
    "bie,ehd->bihd",
    "bid,e->bide",
    "bid,bid->bi",
    "bid,bid->",
    "d,d->",
    "i,j->ij",
    "bid,d->bid",
    "bid,bjd,d->bij",
    "bid,de,bje->bij",
    "bi,bi->bi",
    "bid->bdi",
    "bii->bi",
    "bid->b",
    "bid,bjd",
    "...d,de->...e",
    "...de,...e->...d",
    "...d,...e",
    "b...d,de->be...",
    "d...,i...->...di",
    "bbd,d->b",
    "bid,bje->bij",
    "bid,je->ij",
    "bid, bjd -> bij",
]


def operands(equation: str) -> list[Tensor]:
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [draw([SIZES[c] for c in term.replace("...", "bi")]) for term in terms]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_spelled_out_is_the_same_function(equation: str) -> None:
    given = operands(equation)
    torch.testing.assert_close(spell_out_einsum(equation, given), torch.einsum(equation, *given))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...d,...d->...", [(4, 6), (3, 4, 6)]),
        ("bid,bjd->bij", [(1, 4, 6), (2, 5, 6)]),
        ("bid,bjd->bij", [(2, 4, 6), (2, 5, 1)]),
        ("...", [(2, 3)]),
        ("->", [()]),
    ],
)
def test_sizes_of_one_stand_for_every_size(equation: str, shapes: list[tuple[int, ...]]) -> None:
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(spell_out_einsum(equation, given), torch.einsum(equation, *given))


class Weighted(nn.Module):
    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.weight, self.equation = nn.Parameter(torch.randn(shape)), equation

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.weight)


@pytest.mark.parametrize(("equation", "shape"), [("bid,de->bie", (6, 7)), ("bid,ed->bie", (7, 6))])
def test_a_weight_in_an_einsum_is_a_linear_map(equation: str, shape: tuple[int, int]) -> None:
    graph = canonical(trace(Weighted(equation, *shape), (torch.randn(2, 4, 6),)))
    assert {n.op for n in graph.nodes.values()} - {"parameter", "input", "aten.t", "aten.permute"} == {"linear"}
