"""Models from the user's own code: a factory, or a live module that is left as it is."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from deadweight.errors import DeadweightError
from deadweight.source.model import ModelSpec, open_model


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.parametrize("factory", ["linear_with_tensor", "linear_with_tuple", "linear_with_keywords"])
def test_a_factory_gives_a_module_and_its_inputs(factory: str) -> None:
    source = open_model(f"toys:{factory}")
    assert source.has_weights and source.config is None and not source.module.training
    args, kwargs = source.draw(torch.Generator().manual_seed(0))
    assert source.module(*args, **kwargs).shape == (3, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("toys:alone", "without example inputs"),
        ("toys:nothing", "returned None; expected an nn.Module"),
        ("toys:coming", "returned a coroutine; expected an nn.Module"),
        ("toys:scripted_inside", "0 of toys:scripted_inside is a TorchScript module"),
        ("toys:quantised", "1 of toys:quantised is a quantised Linear; expected the module before quantisation"),
        ("toys:no_forward", r"is a ModuleList without forward\(\)"),
        ("toys:three", "returned a tuple of 3"),
        ("toys:broken", r"the disk is .*full, at toys.py:\d+"),
        ("toys:alon", "has no alon; expected a callable of that name: did you mean alone"),
        ("toys:Linear", "has no Linear; expected a callable of that name$"),
        ("toys:Fixed", r"--inputs 2x3x32x32 with the right sizes"),
        ("tests/toys.py:alone", "a file of Python code; expected package.module:callable, perhaps tests.toys:alone,"),
        ("toys.py", "perhaps toys:build,"),
        ("toys.py:alone", "perhaps toys:alone,"),
        ("tests/toys:alone", "a hub id has no colon; .* with dots between packages"),
        ("toys:absent", "has no absent"),
        ("toys:calls", "is an int; expected a callable"),
        (
            "no_such_package.at_all:model",
            r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_package'\)",
        ),
        ("toys_that_raise:model", r"RuntimeError: not today, at toys_that_raise.py:\d"),
    ],
)
def test_a_factory_that_fails_says_why_on_one_printable_line(spec: str, message: str) -> None:
    with pytest.raises(DeadweightError, match=message) as caught:
        open_model(spec)
    assert str(caught.value).isprintable()


def test_a_factory_without_inputs_takes_those_that_are_passed() -> None:
    assert open_model("toys:alone", inputs=torch.randn(1, 4)).args[0].shape == (1, 4)


def test_a_callable_that_is_called_once_gives_the_same_weights_at_every_opening() -> None:
    once, often = ModelSpec("toys:linear_with_tensor").built_once(), ModelSpec("toys:linear_with_tensor")
    assert torch.equal(once.open().module.weight, once.open(weights=True).module.weight)
    assert not torch.equal(often.open().module.weight, often.open().module.weight)
    assert once.open().name == "toys:linear_with_tensor"


def test_what_is_no_callable_is_not_called() -> None:
    module = nn.Linear(2, 2)
    assert ModelSpec(module).built_once().model is module and ModelSpec("demo").built_once().model == "demo"


def test_a_live_module_is_neither_switched_nor_copied() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()
    source = open_model(module, inputs=torch.randn(1, 4))
    assert module.training and not source.module.training
    assert source.module[0].weight is module[0].weight


def test_training_is_kept_where_it_is_asked_for() -> None:
    assert ModelSpec(nn.Linear(4, 4), torch.randn(1, 4), training=True).open().module.training


def test_a_live_hugging_face_module_needs_no_inputs_and_keeps_its_attention() -> None:
    config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=12, vocab_size=11)
    model = BertModel(config)
    before = model.config._attn_implementation
    source = open_model(model)
    assert source.module.config._attn_implementation == "eager" and model.config._attn_implementation == before
    assert source.module(**source.kwargs).last_hidden_state.shape == (1, 5, 8)


@pytest.mark.parametrize("spec", [3, None, ""])
def test_what_is_no_model_is_refused(spec: object) -> None:
    with pytest.raises(DeadweightError, match=r"a hub id or an nn\.Module"):
        open_model(spec)
