"""The allocation study: its claims hold where it says so, its task is a 4-gram, and a layer learns it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deadweight.audit.run import one_thread


def test_the_target_is_a_sum_over_the_last_four_tokens(study: Callable) -> None:
    s3 = study("s3_allocation")
    kernel = s3.kernels(3, seeds=2)
    x, y = s3.sequences(kernel, 5, 9, torch.Generator().manual_seed(0))
    expected = sum(kernel[1, m - 1] @ x[1, 2, 7 - m] for m in range(1, 5))
    assert torch.allclose(y[1, 2, 7], expected, atol=1e-6)
    _, many = s3.sequences(kernel, 2000, 9, torch.Generator().manual_seed(0))
    assert float(many[:, :, 4:].var()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("scores", ["standard", "by lag"])
def test_attention_sees_no_later_token_and_seeds_are_independent(study: Callable, scores: str) -> None:
    s3 = study("s3_allocation")
    w = s3.first_weights(scores, 4, 3, s3.Settings(seeds=2, length=9))
    x = torch.randn(2, 5, 9, 3, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, :, 6:] += 1
    changed[1] += 1
    before, after = s3.layer(w, x), s3.layer(w, changed)
    assert torch.allclose(before[0, :, :6], after[0, :, :6], atol=1e-6)
    assert not torch.allclose(before[0, :, 6:], after[0, :, 6:], atol=1e-3)


def test_four_heads_learn_more_of_a_four_gram_than_one_can(study: Callable) -> None:
    s3 = study("s3_allocation")
    s = s3.Settings(seeds=1, steps=150, batch=16, length=10, budget=64, rates=(1e-2, 3e-2))
    with one_thread():
        one, four = (s3.trained("by lag", heads, 4, s)["errors"][0] for heads in (1, 4))
    assert four < 0.5 * one and one > 0.5  # one head has one place to look at, and four are needed


def test_the_conditions_of_the_claim_are_found(study: Callable) -> None:
    found = study("s3_allocation").conditions()
    assert found["claimed"] and found["with_epsilon"] and found["multiple_of_8_and_one_size"]
    assert 0.2 < found["exponent"] < 0.25 and 0.1 < found["fifth_lag"] < 0.2
    assert found["others"]["tokens of 16 numbers"]["groups"] == [[4, 16]] * 4


def test_a_record_is_written_and_read(study: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3, out = study("s3_allocation"), tmp_path / "record.json"
    monkeypatch.setattr(s3, "HEADS", (1, 4))
    s3.run(out=out, seeds=2, steps=1, most=128)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert len(record["trained"]) == 8 and record["setting"]["torch"] == torch.__version__
    page = s3.written(record)
    assert "| here | 1.326 | 0.166 | 0.481 | 0.580 | 0.841 | 0.965 |" in page
    assert "Not all numbers of heads were run" in page
    s3.figure(record, tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size > 1000
