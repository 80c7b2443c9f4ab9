"""Models trained together are the models that would have been trained alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deadweight.train.data import TokenSplit, batch
from deadweight.train.ensemble import Ensemble, Member, train_together
from deadweight.train.objective import Objective
from deadweight.train.optimizer import make_optimizer
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

TEXT = np.frombuffer(b"the cat sat on the mat, and the dog sat on the log. " * 40, dtype=np.uint8)
TOKENS = TokenSplit(TEXT, TEXT[:400])
CONFIG = TransformerConfig(d_model=16, n_layers=2, heads=2, context=16, vocab_size=256)
TRAIN = Train(steps=5, batch=3, warmup=2, log_every=1, compile=False)


def alone(member: Member, config: TransformerConfig) -> list[float]:
    """The same training with torch's own AdamW and clipping."""
    torch.manual_seed(member.seed)
    model = TransformerForCausalLM(config).train()
    objective = Objective(model)
    settings = Train(**{**TRAIN.__dict__, "weight_decay": member.weight_decay, "learning_rate": member.learning_rate})
    optimizer = make_optimizer(model, settings, torch.device("cpu"))
    found = []
    for step in range(TRAIN.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        loss = objective(batch(TEXT, step, member.seed, TRAIN.batch, config.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_member_has_the_losses_it_would_have_alone() -> None:
    members = [Member(0, 1e-2, 0.5), Member(1, 3e-3, 0.0), Member(0, 1e-2, 0.5, scale=0.5)]
    together = train_together(Ensemble(CONFIG, members, TRAIN, torch.device("cpu")), TOKENS)
    half = TransformerConfig(**{**CONFIG.to_diff_dict(), "scale": 0.5 * 8**-0.5, "model_type": None})
    wanted = [alone(members[0], CONFIG), alone(members[1], CONFIG), alone(members[2], half)]
    for curve, losses in zip(together, wanted, strict=True):
        assert list(curve.train_loss) == pytest.approx(losses, rel=2e-4)
    assert list(together[0].train_loss) != pytest.approx(wanted[1], rel=2e-4)
    assert list(together[2].train_loss) != pytest.approx(wanted[0], rel=1e-7)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_member_that_diverges_leaves_the_others_alone() -> None:
    members = [Member(0, 1e-2, 0.1), Member(0, 1e30, 0.1)]
    steps = Train(**{**TRAIN.__dict__, "steps": 8})
    good, bad = train_together(Ensemble(CONFIG, members, steps, torch.device("cpu")), TOKENS)
    assert good.diverged_at is None and np.isfinite(good.valid_loss)
    assert bad.diverged_at is not None


def test_only_a_learned_scale_moves() -> None:
    members = [Member(0, 1e-2, 0.1, scale=0.5), Member(0, 1e-2, 0.1, scale=0.5, learned_scale=True)]
    ensemble = Ensemble(CONFIG, members, TRAIN, torch.device("cpu"), compiled=False)
    name = next(n for n in ensemble.weights if n.endswith("log_scale"))
    before = ensemble.weights[name].detach().clone()
    for step in range(3):
        tokens = torch.stack([batch(TEXT, step, 0, 3, 16)] * 2)
        ensemble.step(step, tokens)
    after = ensemble.weights[name].detach()
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1], after[1])
