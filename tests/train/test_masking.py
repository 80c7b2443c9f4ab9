"""Encoders: tokens are masked by seed and step alone, hidden tokens are predicted, and a run learns and is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from deadweight.errors import DeadweightError
from deadweight.train import Run, train
from deadweight.train.masking import HIDDEN, hide_tokens, split_hidden
from deadweight.train.objective import Objective, language_model
from deadweight.transformer import TransformerConfig, TransformerForMaskedLM

Tiny = Callable[..., Run]


def test_each_window_has_the_same_number_of_masked_tokens_and_they_depend_on_seed_and_step() -> None:
    windows = torch.randint(256, (5, 41))
    one = hide_tokens(windows, 257, seed=3, step=7)
    read, wanted = split_hidden(one, 257)
    assert torch.equal((wanted >= 0).sum(1), torch.full((5,), round(HIDDEN * 40)))
    assert torch.equal(torch.where(wanted >= 0, wanted, read), windows[:, :-1])
    assert bool((read[wanted >= 0] == 256).all())
    assert torch.equal(hide_tokens(windows, 257, seed=3, step=7), one)
    assert not torch.equal(hide_tokens(windows, 257, seed=3, step=8), one)


def test_the_loss_is_that_of_the_masked_tokens_alone() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(d_model=16, n_layers=1, heads=2, context=20, vocab_size=257, causal=False)
    model = language_model(config)
    tokens = hide_tokens(torch.randint(256, (3, 21)), 257, seed=0, step=0)
    read, wanted = split_hidden(tokens, 257)
    logits = model(read).logits[wanted >= 0]
    assert float(Objective(model)(tokens).detach()) == pytest.approx(
        float(F.cross_entropy(logits, wanted[wanted >= 0]).detach()), rel=1e-5
    )


@pytest.mark.parametrize("place", ["pre", "post"])
def test_an_encoder_learns_and_is_written(tiny: Tiny, tmp_path: Path, place: str) -> None:
    changes = {"model__causal": False, "model__norm_place": place, "train__steps": 60, "train__learning_rate": 1e-2}
    result = train(tiny(**changes), tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1.0 and result.valid_loss < losses[0] - 1.0
    model = TransformerForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == 257 and not model.config.causal


def test_a_run_that_was_stopped_masks_the_same_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tiny(model__causal=False), tmp_path / "whole")
    from deadweight.train.loop import Trainer

    step = Trainer.one_step

    def stops(self: Trainer) -> torch.Tensor:
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "one_step", stops)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(model__causal=False), tmp_path / "stopped")
    monkeypatch.undo()
    assert train(tiny(model__causal=False), tmp_path / "stopped").valid_loss == whole.valid_loss


def test_a_vocabulary_without_room_for_the_mask_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match=r"found vocab_size = 256; expected at least 257: .* and a mask"):
        train(tiny(model__causal=False, model__vocab_size=256), tmp_path / "out")
