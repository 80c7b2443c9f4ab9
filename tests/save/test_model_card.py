"""Model cards say what was done, what was measured, and how to load the folder."""

from __future__ import annotations

import pytest

from deadweight.save.model_card import CodedCacheCard, ErrorRow, LawRow, ReducedCard, SmallerHeadsCard

LOADING = 'model = deadweight.load("out")'
CARDS = {
    "reduced": ReducedCard("org/model", (1000, 900), (LawRow("DW002 key-bias", 4, 100),), None),
    "heads": SmallerHeadsCard("org/model", (64, 32), (1000, 900), "perplexity 2.00 → 2.10"),
    "cache": CodedCacheCard("org/model", (512, 128), 1024, 0.27, ("one text: +1 %", "another text: +2 %")),
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_a_header_a_title_and_the_code_that_loads_the_model(name: str) -> None:
    text = CARDS[name].text(LOADING)
    assert text.startswith("---\ntags: [deadweight]\n---\n# model, ")
    assert f"```python\n{LOADING}\n```" in text and text.endswith("\n")


def test_a_reduced_card_counts_what_is_gone_law_by_law() -> None:
    text = CARDS["reduced"].text(LOADING)
    assert "100 of 1,000 parameters gone (10.00%)" in text
    assert "| DW002 key-bias | 4 | 100 |" in text


def test_errors_are_listed_only_if_they_were_measured() -> None:
    assert "How it was checked" not in CARDS["reduced"].text(LOADING)
    checked = ReducedCard("m", (10, 9), (), "6 random inputs", (ErrorRow("logits", 1e-15, None, 3e-6),))
    assert "| logits | 1.0e-15 | not measured | 3.0e-06 |" in checked.text(LOADING)


def test_a_compressed_card_says_that_the_function_is_another_one_and_what_it_costs() -> None:
    for card in (CARDS["heads"], CARDS["cache"]):
        assert "not the same function" in card.text(LOADING)
    assert "32 of 64" in CARDS["heads"].text(LOADING) and "perplexity 2.00 → 2.10." in CARDS["heads"].text(LOADING)
    cache = CARDS["cache"].text(LOADING)
    assert "128 bytes of cache per token in place of 512" in cache and "27.0% of a 16-bit cache" in cache
    assert "- one text: +1 %\n- another text: +2 %" in cache
