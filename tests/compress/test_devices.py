"""Heads are measured, cut, healed and judged on the device of the model: no operation mixes devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deadweight.compress.run import compress
from deadweight.saturation.run import saturation

from .elsewhere import elsewhere, marked


@pytest.fixture(params=["all of it fits", "block by block"])
def away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    with elsewhere(monkeypatch, room=1 << 40 if request.param == "all of it fits" else 100):
        yield


def test_the_device_of_the_tests_is_strict(away: None) -> None:
    there = torch.ones(3, device="cuda")
    assert there.device.type == "cuda" and (there + 1).device.type == "cuda"
    assert there.cpu().device.type == "cpu" and torch.ones(3).to(there).device.type == "cuda"
    with pytest.raises(RuntimeError, match="same device: add"):
        torch.add(there, torch.ones(3))


@pytest.mark.parametrize("family, layout", [("llama", "slim"), ("llama", "stock"), ("gpt2", "slim"), ("qwen3", "slim")])
def test_a_model_is_compressed_and_healed_where_it_is(
    family: str, layout: Any, make: Callable, words: Any, away: None
) -> None:
    healed = 2 if layout == "slim" else 0
    found = compress(make(family), inputs=words, keep_attention=0.6, step=2, layout=layout, heal=healed)
    assert found.module is not None
    assert all(marked(t) for t in (*found.module.parameters(), *found.module.buffers()))
    assert found.judgement.error < 1


def test_saturation_is_measured_where_the_model_is(away: None) -> None:
    found = saturation("demo", length=16, windows=2, rows=4)
    assert all(0 < f <= 1 for f in found.factors)
