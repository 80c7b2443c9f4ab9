"""Fitted maps from codes to keys and values have the least squared error, and lose less on held-back text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deadweight.compress import fit_decoders as fitting
from deadweight.compress.code_cache import measure_model
from deadweight.compress.coded_model import allocate, with_coded_cache
from deadweight.compress.fit_decoders import CodeMoments, fit_coder, least_squares
from deadweight.compress.job import CompressionJob
from deadweight.compress.judge import judge
from deadweight.compress.run import open_streamed
from deadweight.compress.settings import Settings, Structure
from deadweight.progress import silent
from deadweight.slim.coder import Coder


def measured(model: Any, **options: Any) -> Any:
    source, precision = open_streamed(model, None)
    return measure_model(CompressionJob(source, model, None, Settings(**options), precision, silent))


def first_coder(model: Any) -> Coder:
    return next(part for part in model.modules() if isinstance(part, Coder))


@pytest.mark.parametrize("structure", ["joint", "all", "half", "pair"])
def test_fitted_maps_miss_nothing_that_codes_say_linearly(
    structure: Structure, make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, for fixed codes: what is missed is uncorrelated with every code. Blocks of keys stay blocks."""
    monkeypatch.setattr(fitting, "RIDGE", 0.0)
    work = measured(make("llama").double(), inputs=words, keys=structure)
    coder = first_coder(with_coded_cache(work.source.module, allocate(work.options, 0.4, work.tokens))[0])
    generator, positions, first = torch.Generator().manual_seed(0), torch.arange(40)[None], coder.spec.first
    key, value = torch.randn(2, 4, 2, 40, 8, dtype=torch.float64, generator=generator)
    states = coder.centred(key, value, positions)
    codes, mixed = coder.rounded(*states), coder.key_decode != 0
    vectors = torch.cat([torch.ones_like(codes[0][..., :1]), *codes], -1)[:, :, first:]
    means = coder.key_mean.clone(), coder.value_mean.clone()

    def correlations(shifts: list[Tensor]) -> list[Tensor]:
        read = coder.centred_of(*codes)
        parts = zip(states, read, shifts, strict=True)
        return [torch.einsum("bstn,bstm->snm", vectors, (a - b - c)[:, :, first:]) for a, b, c in parts]

    before = correlations([torch.zeros(1, dtype=torch.float64)] * 2)
    moments = CodeMoments()
    moments.add(coder, key, value, positions)
    assert isinstance(moments.codes, Tensor) and isinstance(moments.missed, Tensor)
    fit_coder(coder, moments.codes, moments.missed)
    now = (coder.key_mean, coder.value_mean)
    keys, values = correlations([(a - b).view(coder.spec.n_sets, 1, -1) for a, b in zip(now, means, strict=True)])
    assert torch.equal(mixed, coder.key_decode != 0)
    assert mixed[mixed.any(-1)].all() == (structure in ("joint", "all"))
    assert keys[:, 1:][:, : mixed.shape[1]][mixed].abs().max() < 1e-9 < before[0].abs().max()
    assert values.abs().max() < 1e-9 < before[1].abs().max()


def test_a_code_that_is_always_zero_adds_nothing() -> None:
    codes = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    change = least_squares(codes, torch.tensor([[4.0], [0.0]], dtype=torch.float64))
    assert change[1] == 0 and float(change[0]) == pytest.approx(2.0, rel=2 * fitting.RIDGE)


def test_fitted_maps_lose_less_on_text_that_they_were_not_fitted_to() -> None:
    """The embedded model at an eighth of the bytes, on windows that were held back."""
    work = measured("demo", windows=24, length=128)
    plan, original = allocate(work.options, 0.125, 1024), work.source.module
    plain, fitted = (with_coded_cache(original, plan, None, text)[0] for text in ((), work.calibration.measure))
    error = judge(original, fitted, work.calibration.judge).error
    assert error < 0.95 * judge(original, plain, work.calibration.judge).error


def test_text_beyond_the_first_tokens_is_not_read(monkeypatch: pytest.MonkeyPatch, make: Callable, words: Any) -> None:
    read = []
    monkeypatch.setattr(fitting, "FITTED", words["input_ids"][:8].numel())
    monkeypatch.setattr(fitting, "run_model", lambda *_, **__: read.append(1))
    fitting.fit_decoders(make("llama"), [{"input_ids": ids} for ids in words["input_ids"].split(4)])
    assert len(read) == 2
