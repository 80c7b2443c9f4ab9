"""Repeated runs of one shape have the losses of single runs; shapes start from the same weights."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from deadweight.train.data import TokenSplit, batch, windows
from deadweight.train.ensemble import Member
from deadweight.train.objective import Objective
from deadweight.train.optimizer import make_optimizer
from deadweight.train.repeated_runs import Repeated, TimedCurve, TrainingJob, first_weights, settings_of, speed
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

TEXT = np.frombuffer(b"the cat sat on the mat, and the dog sat on the log. " * 40, dtype=np.uint8)
TOKENS = TokenSplit(TEXT, TEXT[:400])
SIZES = {"d_model": 16, "n_layers": 2, "heads": 2, "context": 16, "vocab_size": 256}
CONFIG = TransformerConfig(**SIZES)
TRAIN = Train(batch=3, compile=False)
CPU = torch.device("cpu")


def alone(member: Member, config: TransformerConfig, steps: int) -> tuple[list[float], float]:
    """The same training, written out: losses of every step, and the loss on the validation text."""
    model = TransformerForCausalLM(config).train()
    first_weights(model, member)
    objective, train = Objective(model), settings_of(TRAIN, member, steps)
    optimizer, losses = make_optimizer(model, train, CPU), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        loss = objective(batch(TEXT, step, member.seed, train.batch, config.context))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, objective(windows(TEXT[:400], config.context)).item()


def one(repeated: Repeated, member: Member, steps: int) -> TimedCurve:
    return repeated.run(TrainingJob("shape", (member,), steps), TOKENS)[0]


def test_every_training_has_the_losses_it_would_have_alone() -> None:
    repeated = Repeated(CONFIG, TRAIN, CPU)
    repeated.prepare()
    for member, steps in ((Member(0, 1e-2, 0.5), 6), (Member(1, 3e-3, 0.0), 4), (Member(0, 1e-2, 0.5), 6)):
        outcome = one(repeated, member, steps)
        losses, end = alone(member, CONFIG, steps)
        assert list(outcome.curve.train_loss) == pytest.approx(losses, rel=1e-5)  # float32, summed in one order
        assert outcome.curve.valid_loss == pytest.approx(end, rel=1e-5)
        assert outcome.tokens_per_second > 0 and len(outcome.seconds) == steps


def test_runs_side_by_side_have_the_losses_they_would_have_alone() -> None:
    members = (Member(0, 1e-2, 0.5), Member(1, 3e-3, 0.0), Member(0, 3e-2, 0.1))
    repeated = Repeated(CONFIG, TRAIN, CPU)
    repeated.prepare(side_by_side=2)
    for member, outcome in zip(members, repeated.run(TrainingJob("shape", members, 5), TOKENS), strict=True):
        losses, end = alone(member, CONFIG, 5)
        assert outcome.curve.member == member
        assert list(outcome.curve.train_loss) == pytest.approx(losses, rel=1e-5)
        assert outcome.curve.valid_loss == pytest.approx(end, rel=1e-5)


def test_rounded_weights_are_judged_beside_the_exact_ones() -> None:
    repeated = Repeated(CONFIG, TRAIN, CPU)
    (outcome,) = repeated.run(TrainingJob("shape", (Member(0, 1e-2, 0.1),), 30, rounded_to=(16, 2)), TOKENS)
    assert outcome.rounded[16] == pytest.approx(outcome.curve.valid_loss, rel=1e-4)  # 16 bits round by 2⁻¹⁶
    assert outcome.rounded[2] > outcome.curve.valid_loss + 1e-3


def test_an_exact_change_of_weights_along_the_way_changes_the_path_and_not_the_first_steps() -> None:
    member = Member(0, 1e-2, 0.1)
    plain, turned = (
        Repeated(CONFIG, TRAIN, CPU).run(TrainingJob("shape", (member,), 8, upkeep=upkeep, every=4), TOKENS)[0]
        for upkeep in (None, "both")
    )
    same, other = plain.curve.train_loss, turned.curve.train_loss
    assert same[:4] == other[:4] and same[4] == pytest.approx(other[4], rel=1e-5)  # float32, rounded anew
    assert same[7] != pytest.approx(other[7], rel=1e-6)


def test_a_constant_scale_is_that_of_the_shape_and_a_learned_one_moves() -> None:
    scaled = TransformerConfig(**SIZES, learned_scale=True)
    repeated = Repeated(scaled, TRAIN, CPU)
    half = replace(Member(0, 1e-2, 0.1), scale=0.5)
    found = one(repeated, half, 5).curve.train_loss
    assert {float(p.exp()) for p in logs(repeated)} == {0.5}
    wanted, _ = alone(half, TransformerConfig(**SIZES, scale=0.5 * 8**-0.5), 5)
    assert list(found) == pytest.approx(wanted, rel=1e-4)  # the scale enters the scores in another place
    assert list(found) != pytest.approx(alone(half, CONFIG, 5)[0], rel=1e-7)
    one(repeated, replace(half, learned_scale=True), 5)
    assert 0.5 not in {float(p.exp()) for p in logs(repeated)}


def logs(repeated: Repeated) -> list[torch.Tensor]:
    return [p for n, layer in repeated.models[0].named_parameters() if n.endswith("log_scale") for p in layer.detach()]


def test_shapes_begin_with_the_same_weights_wherever_both_have_them() -> None:
    one, other = TransformerForCausalLM(CONFIG), TransformerForCausalLM(TransformerConfig(**SIZES, query="identity"))
    full, identity = first_weights(one, Member(3, 1.0, 0.0)), first_weights(other, Member(3, 1.0, 0.0))
    assert set(full) - set(identity) == {f"transformer.layers.{i}.attention.query.weight" for i in range(2)}
    assert all(torch.equal(full[name], value) for name, value in identity.items())
    rows = "transformer.layers.{}.attention.key.weight"
    assert not torch.equal(full[rows.format(0)], full[rows.format(1)])
    before = full["transformer.tokens.weight"].clone()
    assert not torch.equal(before, first_weights(one, Member(4, 1.0, 0.0))["transformer.tokens.weight"])


def test_a_training_that_diverges_stops_and_says_when() -> None:
    outcome = one(Repeated(CONFIG, TRAIN, CPU), Member(0, 1e30, 0.1), 80)
    assert outcome.curve.diverged_at is not None and outcome.curve.diverged_at < 80
    assert math.isnan(outcome.curve.valid_loss)


def test_speed_is_the_median_and_a_pause_does_not_count() -> None:
    assert speed((10, 20, 30), (5.0, 6.0, 7.0)) == 10.0
