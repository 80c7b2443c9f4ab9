"""The study of plans: plans of equal size, a run that resumes, a page that says what the numbers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deadweight.allocate.plan import UniformShape
from deadweight.transformer import TransformerForCausalLM


def test_rivals_have_as_many_parameters(study: Callable[[str], ModuleType]) -> None:
    s3 = study("s3_plans")
    assert {sum(h * d for h, d in layers) for layers in s3.RIVALS.values()} == {s3.SHAPE.width}
    assert len({TransformerForCausalLM(s3.config(layers)).num_parameters() for layers in s3.RIVALS.values()}) == 1


@pytest.mark.parametrize("weights", [[1, 1, 1], [5, 3, 1], [100, 1, 1], [0, 0, 7]])
def test_shares_are_whole_and_add_up(study: Callable[[str], ModuleType], weights: list[int]) -> None:
    found = study("s3_plans").shares(weights, 12)
    assert sum(found) == 12 and min(found) >= 1
    assert sorted(found, reverse=True) == [f for _, f in sorted(zip(weights, found, strict=True), reverse=True)]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_study_plans_trains_resumes_and_writes_its_page(
    study: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = study("s3_plans")
    monkeypatch.setattr(s3, "SHAPE", UniformShape(32, 2, 2, 16))
    monkeypatch.setattr(s3, "RIVALS", {s3.EQUAL: [(2, 16)] * 2, "small heads early": [(4, 8), (2, 16)]})
    text, out = tmp_path / "t.txt", tmp_path / "plans.json"
    text.write_text("the cat sat on the mat, and the dog lay by the door. " * 900)
    s3.plans(text=str(text), out=out, steps=4)
    assert set(json.loads(out.read_text())["plans"]) == {*s3.RIVALS, s3.BOUND, s3.SATURATED, s3.NEED}
    for only in ([s3.EQUAL], [s3.EQUAL, "small heads early", s3.BOUND]):
        s3.run(text=str(text), out=out, steps=3, batch=2, seeds=2, only=only)
    record = json.loads(out.read_text())
    assert {name: len(c) for name, c in record["curves"].items()} == dict.fromkeys(only, 2)
    for curve in record["curves"][s3.EQUAL]:
        curve["valid_loss"] += 1.0
    assert "*The published strategy beats equal heads.* **Holds here**" in s3.written(record)
    for curve in record["curves"][s3.EQUAL]:
        curve["valid_loss"] -= 2.0
    assert "*The published strategy beats equal heads.* **Not seen here**: worse" in s3.written(record)
