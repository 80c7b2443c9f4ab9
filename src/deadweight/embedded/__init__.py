"""The model that comes with the package, its tokens, and English text to measure it on: no network, no downloads.

A byte-level GPT-2 of 1.88 million parameters, trained on the prose of enwik8 by scripts/train_embedded.py;
model/training.json records how.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path


def path() -> Path:
    """The folder of the model, as `from_pretrained` takes it."""
    return Path(str(resources.files(__name__) / "model"))


def tokens(text: str) -> list[int]:
    """One token per byte of UTF-8."""
    return list(text.encode("utf-8"))


def text(ids: Iterable[int]) -> str:
    """The inverse of `tokens`; bytes that are not valid UTF-8, as in a cut text or a sample, become U+FFFD."""
    return bytes(ids).decode("utf-8", errors="replace")


def prose() -> str:
    """The full paragraphs of Python's manual, which every Python includes for `help()`, one per line."""
    from pydoc_data.topics import topics  # half a megabyte: imported when needed

    paragraphs = (" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n"))
    return "\n".join(p for p in paragraphs if len(p) >= 80 and p[0].isupper() and p.endswith("."))
