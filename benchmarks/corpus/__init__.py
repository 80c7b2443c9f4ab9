"""Modules that people write and use in plain PyTorch, by where they come from."""

from __future__ import annotations

from corpus import checkouts, language, networks, recurrent, research, sequences, torch_nn, vision
from corpus.entry import Entry

ENTRIES: list[Entry] = [
    *torch_nn.ENTRIES,
    *recurrent.ENTRIES,
    *language.ENTRIES,
    *networks.ENTRIES,
    *sequences.ENTRIES,
    *checkouts.ENTRIES,
    *vision.ENTRIES,
    *research.ENTRIES,
]
