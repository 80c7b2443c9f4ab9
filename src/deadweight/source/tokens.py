"""Real text as token ids, where a checkpoint brings its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

PROSE = (
    "The old lighthouse keeper counted the ships each evening and wrote their names in a grey book. In winter there "
    "were few of them, and he had time to read the names of other years aloud, as if somebody might answer.",
    "A function is continuous if small changes of its argument cause small changes of its value. The converse does not "
    "hold: def step(x): return 1 if x > 0 else 0, for example, returns 0 for -1e-9 and 1 for 1e-9.",
)


def text_pieces(folder: Path) -> tuple[Tensor, ...]:
    """A few pieces of prose in the folder's own tokens; nothing where it has no tokenizer that can be read."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return ()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        return tuple(torch.tensor([tokenizer(text)["input_ids"]]) for text in PROSE)
    except Exception:  # noqa: BLE001 - a stranger's files: without a tokenizer, random tokens do
        return ()
