"""Runs that take seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deadweight.train import Run, make_run

MODEL = {"d_model": 16, "n_layers": 2, "heads": 2, "context": 16}
TRAIN = {
    "steps": 6,
    "batch": 4,
    "warmup": 2,
    "log_every": 1,
    "evaluate_every": 100,
    "save_every": 2,
    "evaluate_tokens": 500,
}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short text with something to learn in it."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat, and the dog sat on the log. é\n" * 120, encoding="utf-8")
    return str(file)


@pytest.fixture
def tiny(text: str) -> Callable[..., Run]:
    """A tiny run; keywords TABLE__KEY change it."""

    def make(**changes: Any) -> Run:
        tables: dict[str, dict[str, Any]] = {"model": dict(MODEL), "data": {"text": text}, "train": dict(TRAIN)}
        for key, value in changes.items():
            table, _, name = key.partition("__")
            tables[table][name] = value
        return make_run(tables)

    return make
