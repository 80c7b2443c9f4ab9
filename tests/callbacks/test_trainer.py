"""The callback of transformers' Trainer audits once, before the first step, and does not change training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from deadweight.callbacks.once import DeadweightWarning, example_of
from deadweight.callbacks.trainer import AuditCallback
from deadweight.errors import DeadweightError

Train = Callable[..., list[float]]


@pytest.fixture
def train(tmp_path: Path, rows: list[dict[str, Tensor]]) -> Train:
    def run(model: nn.Module, *callbacks: AuditCallback) -> list[float]:
        """Three steps; their losses."""
        args = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return run


def test_a_dead_bias_is_warned_about_and_the_losses_are_the_same(train: Train, attention) -> None:
    callback = AuditCallback()
    with pytest.warns(DeadweightWarning, match=r"8 numbers of Attention cannot learn; DW002 key-bias: k.bias"):
        audited = train(attention(bias=True), callback)
    assert callback.result is not None
    assert audited == train(attention(bias=True)), "the same numbers are drawn: order of data, dropout"


def test_training_stops_before_the_first_step_if_asked_to(train: Train, attention) -> None:
    model = attention(bias=True)
    before = model.q.weight.clone()
    with pytest.raises(DeadweightError, match="build the key projection with bias=False"):
        train(model, AuditCallback("stop"))
    assert (model.q.weight == before).all()


def test_a_model_without_dead_parameters_trains_without_a_word(train: Train, attention) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeadweightWarning)
        assert len(train(attention(bias=False), AuditCallback("stop"))) == 3


def test_a_law_that_is_ignored_does_not_stop_training(train: Train, attention) -> None:
    assert len(train(attention(bias=True), AuditCallback("stop", ignore=["key-bias"]))) == 3


def test_an_action_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeadweightError, match="expected 'warn' or 'stop'"):
        AuditCallback("shout")  # type: ignore[arg-type]


def test_a_batch_that_is_no_tensor_says_how_to_give_inputs(attention) -> None:
    with pytest.raises(DeadweightError, match="pass inputs= to the callback"):
        example_of(attention(bias=True), "text")
