"""Text as token ids, by the tokenizer that a checkpoint brings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import Tokenizer

PROSE = (
    "The old lighthouse keeper counted the ships each evening and wrote their names in a grey book. In winter there "
    "were few of them, and he had time to read the names of other years aloud, as if somebody might answer.",
    "A function is continuous if small changes of its argument cause small changes of its value. The converse does not "
    "hold: def step(x): return 1 if x > 0 else 0, for example, returns 0 for -1e-9 and 1 for 1e-9.",
)
PIECE = 1 << 18  # bytes of text that are encoded as one string
AT_ONCE = 16  # strings that are encoded in one call


def text_pieces(folder: Path) -> tuple[Tensor, ...]:
    """A few pieces of prose, encoded by the folder's tokenizer; none where it has no tokenizer that can be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return ()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)  # without it, it may ask
        return tuple(torch.tensor([tokenizer(text).input_ids]) for text in PROSE)
    except Exception:  # noqa: BLE001 - a stranger's files: without a tokenizer, random tokens do
        return ()


def tokenizer_of(folder: str, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer in a checkpoint's folder; None if there is none. Code in the folder runs only if it is trusted."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")
    if Path(folder).is_dir() and not any((Path(folder) / n).is_file() for n in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a stranger's files
        raise DeadweightError(f"the tokenizer of {printable(folder)} cannot be read ({reason(error)})") from error


def encode_text(text: bytes, tokenizer: Tokenizer, vocabulary: int, name: str) -> list[int]:
    """The token ids of a text for the model `name`; without a tokenizer, the bytes of the text."""
    if tokenizer is None:
        return byte_ids(text, vocabulary, name)
    return known_ids(ids_of_pieces(text, tokenizer, len(text), piece=len(text)), vocabulary, name)


def first_tokens(text: bytes, tokenizer: Tokenizer, vocabulary: int, name: str, wanted: int) -> list[int]:
    """The first token ids of a text, at least `wanted` of them where the text is long enough."""
    if tokenizer is None:
        return byte_ids(text[:wanted], vocabulary, name)
    return known_ids(ids_of_pieces(text, tokenizer, wanted), vocabulary, name)


def byte_ids(text: bytes, vocabulary: int, name: str) -> list[int]:
    if vocabulary != 256:
        raise DeadweightError(
            f"{printable(name)} has {vocabulary:,} tokens and no tokenizer in its folder; expected tokenizer.json, or "
            "a model of bytes (256 tokens)"
        )
    return list(text)


def known_ids(ids: list[int], vocabulary: int, name: str) -> list[int]:
    """The ids; raises if one of them is outside the model's vocabulary."""
    if ids and max(ids) >= vocabulary:
        raise DeadweightError(
            f"{printable(name)} has {vocabulary:,} tokens and its tokenizer gives id {max(ids):,}; expected the "
            "tokenizer that the model was trained with"
        )
    return ids


def ids_of_pieces(text: bytes, tokenizer: Tokenizer, wanted: int, piece: int = PIECE) -> list[int]:
    """At least `wanted` ids, or those of the whole text; pieces of the text, cut at line ends, are encoded at once."""
    ids: list[int] = []
    at = 0
    while at < len(text) and len(ids) < wanted:
        pieces: list[str] = []
        count = min(AT_ONCE, 1 + 4 * (wanted - len(ids)) // piece)  # a token has about four bytes
        while at < len(text) and len(pieces) < count:
            end = text.find(b"\n", at + piece) + 1 or len(text)
            pieces.append(text[at:end].decode("utf-8", errors="replace"))
            at = end
        for piece_ids in tokenizer(pieces, add_special_tokens=False, verbose=False).input_ids:
            ids += piece_ids
    return ids
