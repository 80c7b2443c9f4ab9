"""The study of encoders: variants of a seed begin alike and see the same batches; missing images are reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from deadweight.errors import DeadweightError


@pytest.fixture
def encoders(study: Callable[[str], ModuleType]) -> ModuleType:
    return study("s1_encoders")


def test_variants_of_a_seed_begin_with_the_same_weights_and_the_same_loss(encoders: ModuleType) -> None:
    whole = encoders.Task("masked bytes", 2, "all biases")
    for variant in encoders.VARIANTS:
        task = encoders.Task("masked bytes", 2, variant)
        mine, theirs = whole.model.state_dict(), task.model.state_dict()
        assert theirs.keys() <= mine.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)
        assert float(task.loss(0).detach()) == pytest.approx(float(whole.loss(0).detach()), rel=1e-5)
    left_out = mine.keys() - theirs.keys()
    assert {name.rpartition(".")[2] for name in left_out} == {"bias"} and not any("norm" in name for name in left_out)


def test_an_encoder_learns_masked_bytes(encoders: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"masked bytes": replace(encoders.TASKS["masked bytes"], steps=30, batch=8, warmup=5)}
    monkeypatch.setattr(encoders, "TASKS", tiny)
    before = encoders.Task("masked bytes", 0, "all biases").judged()["loss"]
    assert encoders.trained("masked bytes", 0, "all biases")["loss"] < before - 1.0


def test_missing_images_are_reported_with_the_way_to_get_them(
    encoders: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DeadweightError, match="which is missing: pip install scikit-learn"):
        encoders.digits()
