"""Attention as if tokens were decoded one by one is the same for queries in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deadweight.slim import coded_attention
from deadweight.slim.attention import AttentionOptions
from deadweight.slim.coded_attention import among_both, part_with_own_token, with_own_token

TOKENS = 11
SEEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BIAS = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~SEEN, torch.finfo(torch.float64).min)
CASES = {
    "causal": AttentionOptions(None, 0.5, causal=True),
    "a mask": AttentionOptions(SEEN & (torch.arange(TOKENS) > 1), 0.5),
    "a bias": AttentionOptions(BIAS[None, None], 0.5),
    "all see all": AttentionOptions(None, 0.5),
    "one mask for all queries": AttentionOptions(torch.arange(TOKENS)[None] > 3, 0.5),
    "sinks and a soft cap": AttentionOptions(None, 0.5, True, 0.0, 3.0, torch.ones(4, dtype=torch.float64)),
}


def states() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, TOKENS, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 2, 2)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_once", [1, 4, 5])
def test_queries_in_parts_give_what_all_at_once_give(case: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, coded_key, coded_value = states()
    given = (query, (key, value), (coded_key, coded_value), CASES[case])
    whole = with_own_token(*given)  # with gradients, which need everything at once
    seen = []
    monkeypatch.setattr(coded_attention, "SCORES", at_once * 2 * 4 * TOKENS)
    monkeypatch.setattr(
        coded_attention, "part_with_own_token", lambda *a: seen.append(a[-1]) or part_with_own_token(*a)
    )
    with torch.no_grad():
        parts = with_own_token(*given)
    assert len(seen) == -(-TOKENS // at_once)
    assert torch.allclose(parts, whole, atol=1e-12)  # float64; the order of sums may differ


def test_every_query_sees_itself_exactly_and_others_by_their_codes() -> None:
    query, key, value, coded_key, coded_value = states()
    out = with_own_token(query, (key, value), (coded_key, coded_value), CASES["causal"])
    for head in range(4):
        for t in range(TOKENS):
            keys = torch.cat([coded_key[0, head // 2, :t], key[0, head // 2, t : t + 1]])
            values = torch.cat([coded_value[0, head // 2, :t], value[0, head // 2, t : t + 1]])
            expected = (0.5 * keys @ query[0, head, t]).softmax(0) @ values
            assert torch.allclose(out[0, head, t], expected, atol=1e-12)


@pytest.mark.parametrize("case", [name for name in CASES if name != "sinks and a soft cap"])
def test_coded_and_exact_tokens_side_by_side_give_the_same_with_its_gradients(case: str) -> None:
    query, key, value, coded_key, coded_value = (x.requires_grad_() for x in states())
    mask = CASES[case].mask
    sees = torch.ones(TOKENS, dtype=torch.bool)
    if mask is not None:
        sees = (mask if mask.dtype == torch.bool else mask > -1).expand(1, 1, TOKENS, TOKENS).any(-1).flatten()
    given = [x.repeat_interleave(2, 1) for x in (key, value, coded_key, coded_value)]
    weights = torch.randn(2, 4, int(sees.sum()), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for form in (with_own_token, among_both):
        pairs = ((key, value), (coded_key, coded_value)) if form is with_own_token else (given[:2], given[2:])
        out = form(query, *pairs, CASES[case])  # type: ignore[arg-type]
        assert out.isfinite().all()
        states_of = (query, key, value, coded_key, coded_value)
        found.append(
            [out[:, :, sees], *torch.autograd.grad((out[:, :, sees] * weights).sum(), states_of, retain_graph=True)]
        )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*found, strict=True))
    assert all(x.abs().max() > 1e-3 for x in found[0])
