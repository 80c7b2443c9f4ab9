"""The tokenizer of a trained model, as Hugging Face reads it; also for one token per byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from deadweight.train.data import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def save_tokenizer(corpus: Corpus, context: int, out: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer)) if corpus.tokenizer else byte_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The character by which byte-level tokenizers write each byte: its own if printable, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for place, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(0x100 + place)
    return letters
