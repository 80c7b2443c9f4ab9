"""A step that reads its own data sees what `batch` draws; on a GPU its graph does what the plain step does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deadweight.train.data import batch
from deadweight.train.device_run import DeviceRun, train_side_by_side, window_starts
from deadweight.train.ensemble import Member
from deadweight.train.objective import Objective
from deadweight.train.repeated_runs import first_weights, settings_of
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

TEXT = np.frombuffer(b"the cat sat on the mat, and the dog sat on the log. " * 40, dtype=np.uint8)
CONFIG = TransformerConfig(d_model=16, n_layers=2, heads=2, context=16, vocab_size=256)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def begin(steps: int, seed: int = 0, precision: torch.dtype = torch.float32, optimizer: str = "adamw") -> DeviceRun:
    model = TransformerForCausalLM(CONFIG)
    first_weights(model, Member(seed, 1e-2, 0.1))
    model = model.to(DEVICE).train()
    train = settings_of(Train(batch=3, optimizer=optimizer), Member(seed, 1e-2, 0.1), steps)
    return DeviceRun(model, Objective(model, precision), train, torch.tensor(TEXT, device=DEVICE))


def test_the_windows_of_a_step_are_those_that_batch_draws() -> None:
    run = begin(4, seed=5)
    seen: list[Tensor] = []
    inner = run.loss
    run.loss = lambda tokens: seen.append(tokens.cpu()) or inner(tokens)  # type: ignore[func-returns-value]
    train_side_by_side([run])
    for step, tokens in enumerate(seen):
        assert torch.equal(tokens, batch(TEXT, step, 5, 3, CONFIG.context))
    assert window_starts(run.train, len(TEXT), CONFIG.context).shape == (4, 3)


def test_a_run_that_is_reset_repeats_itself() -> None:
    run = begin(5)
    first = train_side_by_side([run])[0].losses
    run.reset()
    assert train_side_by_side([run])[0].losses == first
    assert len(set(first)) == 5


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_graphs_side_by_side_do_what_plain_steps_do(compiled: bool, optimizer: str) -> None:
    def runs() -> list[DeviceRun]:
        made = [begin(20, seed, torch.bfloat16, optimizer) for seed in (0, 1, 2)]
        for run in made:
            run.loss = torch.compile(run.loss, dynamic=False) if compiled else run.loss
        return made

    plain = [train_side_by_side([run])[0].losses for run in runs()]
    captured = runs()
    for run in captured:
        run.capture()
    replayed = [log.losses for log in train_side_by_side(captured)]
    for one, other in zip(plain, replayed, strict=True):
        assert other == pytest.approx(one, rel=2e-2)  # bfloat16; the order of sums is free
    assert plain[0] != pytest.approx(plain[1], rel=2e-2)
