"""Text becomes tokens piece by piece, and no further than is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BatchEncoding

from deadweight.errors import DeadweightError
from deadweight.source import tokens
from deadweight.source.tokens import encode_text, first_tokens, ids_of_pieces

TEXT = "".join(f"line {i} of some text, with ünïcödé\n" for i in range(200)).encode()


class Words:
    """A tokenizer whose id of a word is its length, and which counts the characters that it is given."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, texts: list[str], **_: Any) -> BatchEncoding:
        self.seen += sum(map(len, texts))
        return BatchEncoding({"input_ids": [[len(word) for word in text.split()] for text in texts]})


def test_pieces_are_cut_behind_lines_and_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode_text(TEXT, Words(), 99, "x")
    assert len(whole) == 200 * 7
    for piece in (1, 50, 333, 10**6):
        assert ids_of_pieces(TEXT, Words(), 10**9, piece) == whole
    assert first_tokens(TEXT, Words(), 99, "x", 10**9) == whole
    monkeypatch.setattr(tokens, "AT_ONCE", 2)
    few = Words()
    ids = ids_of_pieces(TEXT, few, 30, 100)
    assert 30 <= len(ids) < 100 and ids == whole[: len(ids)] and few.seen < len(TEXT) // 10


def test_bytes_are_their_own_tokens_and_strange_ones_are_refused() -> None:
    assert encode_text(b"ab\n", None, 256, "x") == [97, 98, 10] and first_tokens(b"abc", None, 256, "x", 2) == [97, 98]
    with pytest.raises(DeadweightError, match="no tokenizer"):
        encode_text(b"a", None, 300, "x")
    with pytest.raises(DeadweightError, match="expected the tokenizer"):
        encode_text(TEXT, Words(), 4, "x")
    assert encode_text(b"", Words(), 4, "x") == []
