"""Which rewrites are kept: by rounding that is simulated, so that no processor decides; each with its own limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import deadweight
from deadweight.reduce import comparison, error_limits, run
from deadweight.reduce.apply import Rewrites
from deadweight.reduce.comparison import relative
from deadweight.reduce.error_limits import Error, Noise
from deadweight.reduce.plan import Request
from deadweight.reduce.trial import Trial, Tried
from deadweight.rewrite.bases import BasisRewrite
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.save.facts import Constant, IdentityBlocks, ZeroPlaces
from deadweight.source.model import ModelSpec


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=23, n_positions=32, n_inner=24)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def trial_of(folder: Path) -> Trial:
    spec = ModelSpec(folder)
    job = run.prepare(spec, Request("slim"), lambda *_: None, weights=True)
    full = run.comparison_of(job, spec, lambda *_: None)
    assert full is not None
    return Trial(job, full)


def test_a_model_that_does_not_run_itself_is_not_blamed_on_what_was_removed(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise deadweight.DeadweightError("the model does not run")

    monkeypatch.setattr("deadweight.reduce.trial.in_own_precision", refuse)
    with pytest.raises(deadweight.DeadweightError, match=r"^the model does not run$"):
        deadweight.reduce(gpt2, tmp_path / "out", select="key-bias")


def test_a_limit_stays_what_it_was_when_a_law_was_accepted(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query-key bases fit with a limit of 50, value-output bases with none: that must not loosen the first."""
    trial, honest = trial_of(gpt2), Trial.try_rewrites

    def tried(self: Trial, rewrites: Rewrites) -> Tried:
        bases = [r for r in rewrites.values() if isinstance(r, BasisRewrite)]
        too_wide = any(r.claim.code == "DW010" or r.growth > 50 for r in bases)
        done = honest(self, rewrites)
        return Tried(done.rewrites, done.made, [Noise(1.0, 1e-7)] if too_wide else done.noise)

    monkeypatch.setattr(Trial, "try_rewrites", tried)
    best, left = trial.within_noise(dict(enumerate(trial.job.plan.rewrites)), lambda *_: None)
    limits = {r.growth for r in best.rewrites.values() if isinstance(r, BasisRewrite)}
    assert limits == {50.0} and {s.code for s in left} == {"DW010"}
    assert [r.growth for r in trial.job.plan.rewrites if isinstance(r, BasisRewrite)].count(
        1e3
    ) > 2  # the plan is as it was


def test_simulated_rounding_is_about_the_real_one(gpt2: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        folder = gpt2.with_name(str(dtype))
        transformers.GPT2LMHeadModel.from_pretrained(gpt2, dtype=dtype).save_pretrained(folder)
        trial = trial_of(folder)
        own = comparison.in_own_precision(trial.full.module, trial.full.calls, trial.full.source.inputs)
        (real,) = relative(own, trial.truth[0])
        (simulated,) = trial.floor
        assert 0.3 < simulated / real < 3


@pytest.mark.parametrize("units", [1, 100])
def test_simulated_rounding_hardly_depends_on_the_last_bits(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    """The same to many digits when every sum of the run is off by units in the last place, as on another processor."""
    before = trial_of(gpt2).floor
    honest, generator = torch.ops.aten.linear.default, torch.Generator().manual_seed(1)

    def off(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value = honest(x, weight)
        return value * (1 + units * 2.2e-16 * torch.randn(value.shape, generator=generator, dtype=torch.float64))

    monkeypatch.setattr("deadweight.graph.evaluate.linear_in_pieces", off)
    after = trial_of(gpt2).floor
    assert after == pytest.approx(before, rel=1e-5) and after != before


def test_rewrites_that_round_too_much_are_left_out(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 model whose changed weights would be stored in bfloat16: nothing that changes them fits."""
    trial = trial_of(gpt2)
    rewrites = {n: r for n, r in enumerate(trial.job.plan.rewrites) if r.claim.code in ("DW002", "DW010")}
    assert trial.try_rewrites(rewrites).fits
    monkeypatch.setattr("deadweight.reduce.job.ReductionJob.precision", lambda self, name: torch.bfloat16)
    assert not trial.try_rewrites(rewrites).fits
    best, left = trial.within_noise(rewrites, lambda *_: None)
    assert {r.claim.code for r in best.rewrites.values()} == {"DW002"}  # its bias is zero already, and nothing changes
    assert {s.code for s in left} == {"DW010"}


def test_a_gross_error_in_the_run_is_seen_whatever_was_simulated() -> None:
    quiet = Noise(1e-7, 1e-7)
    assert Error("logits", 1e-15, own=9e-7, floor=1e-7, noise=quiet).same
    assert not Error("logits", 1e-15, own=1.1e-6, floor=1e-7, noise=quiet).same
    assert not Error("logits", 1e-15, own=1e-7, floor=1e-7, noise=Noise(3.1e-7, 1e-7)).same
    assert not Error("logits", 1e-9, own=1e-7, floor=1e-7, noise=quiet).same
    assert Error("logits", 1e-9, own=1e-7, floor=1e-7, noise=quiet, stored=True).same


def test_settled_facts_are_immutable() -> None:
    nothing = SettledFacts()
    some = nothing.and_also([Constant("a.bias", 0.0, "folded"), ZeroPlaces("a.weight", 0, (3,), because="centred")])
    more = some.and_also(
        [IdentityBlocks("b.weight", 0, ((0, 1),), (0, 1), whole=True), Constant("c.bias", 0.0, "dead")]
    )
    assert some.is_folded("a.bias") and not nothing.is_folded("a.bias") and not more.is_folded("c.bias")
    assert some.centred_channels("a") == (3,) and some.centred_channels("b") == ()
    assert more.is_identity("b.weight") and not some.is_identity("b.weight")
    assert bool(more.dead("c.bias", torch.Size([2])).all()) and not bool(more.dead("a.bias", torch.Size([2])).any())


def test_the_report_says_by_how_much_rounding_grows(gpt2: Path, tmp_path: Path) -> None:
    result = deadweight.reduce(gpt2, tmp_path / "out")
    (error,) = (result.verification or error_limits.Verification(())).errors
    assert error.noise is not None and 0.3 < error.noise.growth <= error_limits.FLOORS
    again = deadweight.verify(gpt2, tmp_path / "out")
    assert again.same and again.errors[0].noise is not None
