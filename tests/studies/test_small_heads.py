"""The study of heads of 4 dimensions: plain SVD is what it says, and the study runs and records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deadweight.compress.linear_map import LinearMap
from deadweight.compress.truncate import truncate_model


def test_plain_svd_of_one_head_is_the_best_approximation_of_its_weights(study: Callable[[str], ModuleType]) -> None:
    s4 = study("s4_heads")
    trial = s4.Trial(8, 16, 1, 1)
    spaces = [s4.plain(trial.source.module, s) for s in trial.measured()]
    heads = spaces[1].heads
    kept = s4.with_sizes(spaces, {(heads.path, 2): 4})
    made = truncate_model(trial.source.module, spaces, kept, bias=True).module

    def product(model: torch.nn.Module) -> torch.Tensor:
        out, values = LinearMap(model, heads.output).weight, LinearMap(model, heads.value.module).weight
        return out[:, 128:192] @ values[heads.value.places[2]]

    old, new = product(trial.source.module), product(made)
    left, sizes, right = torch.linalg.svd(old)
    best = (left[:, :4] * sizes[:4]) @ right[:4]
    assert float((new - best).norm() / old.norm()) < 1e-3
    assert float((new - old).norm() / sizes[4:].norm()) == pytest.approx(1.0, abs=1e-3)


def test_the_study_runs_and_its_page_says_what_was_recorded(
    study: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s4 = study("s4_heads")
    monkeypatch.setattr(s4, "SIZES", (16,))
    s4.run(out=tmp_path / "record.json", windows=8, length=16, steps=1, seeds=2)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["single"]) == 12 and [row["size"] for row in record["whole"]] == [16]
    page = s4.written(record)
    assert "| transformer.h.3.attn, 2 |" in page and f"{record['whole'][0][s4.PLAIN]['kl']:.4f}" in page
    s4.drawn(record, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
