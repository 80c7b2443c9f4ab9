"""Plans: the budget of equal heads, the shapes that the bound asks for, and a file that trains."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import deadweight
from deadweight.allocate.bound import Task
from deadweight.allocate.constraints import Rules
from deadweight.allocate.plan import HeadPlan, UniformShape, plan
from deadweight.allocate.plan_toml import plan_toml
from deadweight.allocate.solver import solve
from deadweight.errors import DeadweightError
from deadweight.train import make_run, train
from deadweight.transformer import TransformerForCausalLM

PROFILE = tuple(1 / m for m in range(1, 17))
SMALL = UniformShape(d_model=64, n_layers=4, heads=4, context=16)


def widths(found: HeadPlan) -> list[int]:
    return [layer.width for layer in found.layers]


@pytest.mark.parametrize("saturation", [None, [1, 1, 0.5, 0.5], [1, 0.9, 0.7, 0.3], [0.2] * 4])
@pytest.mark.parametrize("rules", [Rules(multiple=8), Rules(multiple=4), Rules(multiple=8, sharing=2)])
@pytest.mark.parametrize("d_token", [None, 8, 20])
def test_a_plan_costs_what_equal_heads_cost_and_its_bound_is_no_higher(saturation, rules, d_token) -> None:
    found = plan(SMALL, PROFILE, d_token=d_token, saturation=saturation, rules=rules)
    left = SMALL.width - sum(widths(found))
    assert 0 <= left < rules.sharing * min(layer.size for layer in found.layers)  # not even the smallest head fits
    assert sum(x.error for x in found.layers) <= sum(x.error for x in found.default) * (1 + 1e-12)
    for layer, factor in zip(found.layers, found.saturation, strict=True):
        assert layer.size % rules.multiple == 0 and layer.heads % rules.sharing == 0
        assert layer.size <= -(-factor * max(x.size for x in found.layers) // rules.multiple) * rules.multiple
        assert sum(g.heads for g in layer.groups) == layer.heads


def test_parameters_and_cache_are_those_of_the_model_itself() -> None:
    found = plan(SMALL, PROFILE, saturation=[1, 1, 0.5, 0.25], rules=Rules(multiple=8, sharing=2))
    run = make_run(tomllib.loads(plan_toml(found)))
    model = TransformerForCausalLM(run.config(256))
    for layer, built in zip(found.layers, model.transformer.layers, strict=True):
        assert found.parameters(layer) == sum(p.numel() for p in built.attention.parameters())
        assert found.kv_bytes(layer) == 2 * 2 * built.attention.shape.key_heads * built.attention.shape.d_qk


def test_without_saturation_every_layer_is_the_best_one_by_the_bound() -> None:
    shape = UniformShape(d_model=128, n_layers=3, heads=4)
    found = plan(shape, PROFILE, d_token=16, rules=Rules(multiple=8))
    alone = solve(Task(PROFILE, 16), 128, Rules(multiple=8, one_size=True))
    for layer in found.layers:
        assert layer.error == pytest.approx(alone.error, rel=1e-12)
        assert (layer.heads, layer.size) == (alone.heads, alone.groups[0].size)


def test_later_layers_shrink_and_early_ones_grow() -> None:
    before = plan(SMALL, PROFILE, d_token=16)
    after = plan(SMALL, PROFILE, d_token=16, saturation=[1, 1, 0.5, 0.5])
    assert widths(after)[0] > widths(before)[0] and widths(after)[3] < widths(before)[3]
    assert [layer.size for layer in after.layers] == [16, 16, 8, 8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"saturation": [1, 1]}, "found 2 saturation factors for 4 layers"),
        ({"saturation": [1, 1, 0, 1]}, "factor of 0.0 at layer 2"),
        ({"saturation": [1, 1, 1, 1.5]}, "factor of 1.5 at layer 3"),
        ({"saturation": [1, float("nan"), 1, 1]}, "factor of nan at layer 1"),
        ({"rules": Rules(multiple=128)}, "expected 512 or more"),
        ({"rules": Rules(sharing=3)}, "found 4 heads with 3 per key head"),
    ],
)
def test_an_impossible_plan_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeadweightError, match=words):
        plan(SMALL, PROFILE, **options)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(DeadweightError, match="found 5 heads for d_model = 64"):
        UniformShape(64, 2, 5)


@pytest.mark.filterwarnings("ignore")
def test_the_file_trains_and_the_model_is_audited_and_loaded(tmp_path: Path) -> None:
    found = plan(
        UniformShape(16, 2, 2, 16), PROFILE, d_token=4, saturation=[1, 0.5], rules=Rules(multiple=2, sharing=2)
    )
    tables = tomllib.loads(plan_toml(found))
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the log.\n" * 20, encoding="utf-8")
    tables |= {"data": {"text": str(text)}, "train": {"steps": 2, "batch": 2}}
    result = train(make_run(tables), tmp_path / "out")
    model = deadweight.load(tmp_path / "out")
    assert [shape.heads for shape in model.config.layers] == [layer.heads for layer in found.layers]
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert deadweight.audit(str(tmp_path / "out")).untraced is None
