"""Weights with an axis of heads: every spelling of a projection is the same linear map, with the same laws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, einsum

import deadweight

B, T, D, H, K = 2, 4, 6, 2, 3
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
KEY_BIAS, VALUE_BIAS, BASES = H * K, H * K, H * K * K

Project = Callable[[Tensor, Tensor], Tensor]  # x and a weight to heads: (batch, head, position, size)
PROJECTIONS: dict[str, tuple[tuple[int, ...], Project]] = {
    "width, heads, size": ((D, H, K), lambda x, w: einsum("btd,dhk->bhtk", x, w)),
    "heads, width, size": ((H, D, K), lambda x, w: einsum("btd,hdk->bhtk", x, w)),
    "heads, size, width": ((H, K, D), lambda x, w: einsum("btd,hkd->bhtk", x, w)),
    "size, heads, width": ((K, H, D), lambda x, w: einsum("btd,khd->bhtk", x, w)),
    "positions before heads": ((D, H, K), lambda x, w: einsum("b t d, d h k -> b t h k", x, w).transpose(1, 2)),
    "a matrix seen with heads": ((H * K, D), lambda x, w: einsum("btd,hkd->bhtk", x, w.view(H, K, D))),
    "one matrix for each head": ((H, D, K), lambda x, w: x[:, None] @ w),
    "flattened": ((D, H, K), lambda x, w: (x @ w.flatten(1)).unflatten(-1, (H, K)).transpose(1, 2)),
}
Join = Callable[[Tensor, Tensor], Tensor]  # heads and a weight to the stream
OUTPUTS: dict[str, tuple[tuple[int, ...], Join]] = {
    "heads, size, width": ((H, K, D), lambda y, w: einsum("bhtk,hkd->btd", y, w)),
    "width, heads, size": ((D, H, K), lambda y, w: einsum("bhtk,dhk->btd", y, w)),
    "size, width, heads": ((K, D, H), lambda y, w: einsum("bhtk,kdh->btd", y, w)),
    "one matrix for each head": ((H, K, D), lambda y, w: (y @ w).sum(1)),
}


def attention(project: Project, join: Join, between: Callable[[Tensor], Tensor] = lambda y: y) -> Callable:
    def forward(m, x: Tensor) -> Tensor:
        q, k, v = (project(x, w) for w in (m.q, m.k, m.v))
        q, k, v = q + m.bq[:, None], k + m.bk[:, None], v + m.bv[:, None]
        return torch.tanh(join(between(torch.softmax(q @ k.mT, -1) @ v), m.o) + m.bo)

    return forward


def parts(weight: tuple[int, ...], output: tuple[int, ...]) -> dict[str, Tensor]:
    heads = {name: torch.randn(weight) for name in ("q", "k", "v")}
    return {
        **heads,
        "o": torch.randn(output),
        **{b: torch.randn(H, K) for b in ("bq", "bk", "bv")},
        "bo": torch.randn(D),
    }


def by_law(found: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, dof in found.items():
        total[name[:5]] = total.get(name[:5], 0) + dof
    return total


@pytest.mark.parametrize("name", PROJECTIONS)
def test_every_spelling_of_the_projections_has_biases_and_bases(census: Callable, name: str) -> None:
    shape, project = PROJECTIONS[name]
    result = census(attention(project, OUTPUTS["heads, size, width"][1]), X, **parts(shape, (H, K, D)))
    assert by_law(result.findings) == {"DW002": KEY_BIAS, "DW003": VALUE_BIAS, "DW009": BASES, "DW010": BASES}
    assert result.unexplained == 0


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_spelling_of_the_output_projection_undoes_the_bases(census: Callable, name: str) -> None:
    shape, join = OUTPUTS[name]
    result = census(attention(PROJECTIONS["width, heads, size"][1], join), X, **parts((D, H, K), shape))
    assert by_law(result.findings) == {"DW002": KEY_BIAS, "DW003": VALUE_BIAS, "DW009": BASES, "DW010": BASES}
    assert result.unexplained == 0


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_nonlinear_function_of_the_heads_leaves_no_basis_of_values(census: Callable, name: str) -> None:
    shape, project = PROJECTIONS[name]
    forward = attention(project, OUTPUTS["heads, size, width"][1], torch.sin)
    found = by_law(census(forward, X, **parts(shape, (H, K, D))).findings)
    assert found == {"DW002": KEY_BIAS, "DW009": BASES}


def two_layers(between: Callable[[Tensor], Tensor]) -> Callable:
    def forward(m, x: Tensor) -> Tensor:
        x = torch.nn.functional.layer_norm(x, (D,), m.gain, m.shift, 1e-12)
        hidden = between(einsum("btd,dhk->bthk", x, m.up) + m.bias)
        return torch.tanh(einsum("bthk,hkd->btd", hidden, m.down))

    return forward


SCALED = {"gain": torch.rand(D) + 1, "shift": torch.randn(D), "up": torch.randn(D, H, K)}
SCALED |= {"bias": torch.randn(H, K), "down": torch.randn(H, K, D)}


@pytest.mark.parametrize(("between", "scales"), [(torch.relu, H * K), (torch.tanh, 0)])
def test_hidden_units_have_scales_and_norms_fold_into_a_weight_of_three_axes(
    census: Callable, between: Callable[[Tensor], Tensor], scales: int
) -> None:
    result = census(two_layers(between), X, **SCALED)
    expected = {"DW006": 2 * D, "DW008": H * K, "DW011": scales}
    assert by_law(result.findings) == {law: dof for law, dof in expected.items() if dof}


def with_a_bias_per_head(m, x: Tensor) -> Tensor:
    """One number for all outputs of a head is no bias of single outputs."""
    k = einsum("btd,dhk->bhtk", x, m.k) + m.bk[:, None, None]
    q = einsum("btd,dhk->bhtk", x, m.q)
    return torch.softmax(q @ k.mT, -1)


def test_one_number_for_a_head_is_a_key_bias_and_no_basis_is_claimed(census: Callable) -> None:
    result = census(with_a_bias_per_head, X, q=torch.randn(D, H, K), k=torch.randn(D, H, K), bk=torch.randn(H))
    assert result.findings.get("DW002 bk") == H


def read_twice(m, x: Tensor) -> Tensor:
    """The same weight as two matrices of different shapes."""
    return (
        torch.tanh(einsum("btd,dhk->bthk", x, m.w)).sum(-1)
        + torch.tanh(x[..., :H] @ m.w.permute(1, 2, 0).flatten(1))[..., :1]
    )


def test_a_weight_that_is_read_in_two_layouts_stays_as_it_is_stored(census: Callable) -> None:
    result = census(read_twice, X, w=torch.randn(D, H, K))
    assert result.graph.pieces == {} and result.findings == {}


def relative(m, x: Tensor, positions: Tensor) -> Tensor:
    """Queries with a bias for keys meet keys, and with another bias they meet projected positions."""
    q, k, v, r = (einsum("btd,dhk->bthk", y, w) for y, w in ((x, m.q), (x, m.k), (x, m.v), (positions, m.r)))
    scores = einsum("bihk,bjhk->bhij", q + m.bk, k) + einsum("bihk,bjhk->bhij", q + m.br, r)
    return torch.tanh(einsum("bhij,bjhk,dhk->bid", torch.softmax(scores, -1), v, m.o))


def heads_of(*names: str) -> dict[str, Tensor]:
    return {name: torch.randn(D, H, K) for name in names}


RELATIVE = heads_of("q", "k", "v", "r", "o") | {"bk": torch.randn(H, K), "br": torch.randn(H, K)}
POSITIONS = torch.randn(1, T, D)


def test_keys_and_projected_positions_that_meet_the_same_queries_turn_together(census: Callable) -> None:
    result = census(relative, X, POSITIONS, **RELATIVE)
    assert result.findings == {"DW009 k": BASES, "DW010 v": BASES}
    assert result.unexplained == 0


def read_elsewhere(m, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Projected positions are returned as well, so they may not turn; nor then may queries and keys."""
    return relative(m, x, positions), torch.sin(einsum("btd,dhk->bthk", positions, m.r))


def test_positions_that_are_read_elsewhere_fix_queries_and_keys(census: Callable) -> None:
    assert census(read_elsewhere, X, POSITIONS, **RELATIVE).findings == {"DW010 v": BASES}


def test_an_audit_names_the_stored_weight_and_its_slice(census: Callable) -> None:
    class Stored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = (torch.nn.Parameter(torch.randn(shape)) for shape in ((3, D, H, K), (H, K, D)))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (einsum("btd,dhk->bhtk", x, w) for w in self.qkv)
            return torch.tanh(einsum("bhtk,hkd->btd", torch.softmax(q @ k.mT, -1) @ v, self.o))

    found = deadweight.audit(Stored(), (X,)).findings
    assert {(f.code, f.parameter, f.slice, f.dof) for f in found} == {
        ("DW009", "qkv", ((1, 2),), BASES),
        ("DW010", "qkv", ((2, 3),), BASES),
    }
