"""The measurements of a model's cache, kept in a file for later runs: measuring takes long."""

from __future__ import annotations

from pathlib import Path

import torch

from deadweight.compress.calibration import cache_calibration
from deadweight.compress.code_cache import HELD, MeasuredModel, measure_model
from deadweight.compress.coded_model import CacheOptions
from deadweight.compress.heal import checksum
from deadweight.compress.job import CompressionJob


def measured(job: CompressionJob, kept: Path | None) -> MeasuredModel:
    """Measure the cache of a model, or read what was kept for the same weights and the same calibration."""
    if kept is None:
        return measure_model(job)
    same = identity(job)
    if kept.exists():
        known, caches = torch.load(kept, weights_only=False)  # our own file
        if known == same:
            text = cache_calibration(job.source, job.model, job.settings.calibration)
            options = CacheOptions(caches, job.settings.keys)
            return MeasuredModel(job.source, caches, options, text, {HELD: text.judge}, job.precision)
    work = measure_model(job)
    torch.save((same, work.caches), kept)
    return work


def identity(job: CompressionJob) -> str:
    """What measurements depend on: the weights and the calibration."""
    weights = {name: checksum(tensor) for name, tensor in job.source.module.state_dict().items()}
    return repr((weights, job.settings.calibration))
