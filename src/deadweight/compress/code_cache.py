"""Coding a cache, stage by stage: locate, measure, choose bases and bits, judge, heal, write."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.compress.cache_moments import CacheMoments, CacheRecorder, MeasuredCache
from deadweight.compress.cache_result import CacheCompression, CurvePoint
from deadweight.compress.cache_support import expect_same_decoded
from deadweight.compress.cache_taps import expecting_states
from deadweight.compress.calibration import Batch, Calibration, cache_calibration, judge_batches, text_to_heal_on
from deadweight.compress.coded_model import SMALL, Allocation, CacheOptions, allocate, bytes_for_units, with_coded_cache
from deadweight.compress.deadweight_json import cache_card, cache_data
from deadweight.compress.find_caches import find_caches
from deadweight.compress.heal import Healed, Healing, heal_or_undo, healing_folder
from deadweight.compress.job import CompressionJob
from deadweight.compress.judge import judge
from deadweight.compress.locate import Heads
from deadweight.compress.measure import measure
from deadweight.compress.result import Judgement
from deadweight.compress.rotary_layout import expect_constant_rates, measure_rates
from deadweight.compress.settings import CACHE_RATE, CURVE_SHARES, LARGEST, USUAL_CACHE, Settings
from deadweight.compress.streaming import device_of
from deadweight.errors import DeadweightError
from deadweight.progress import Progress
from deadweight.save.compressed_folder import CompressedModel, write_compressed
from deadweight.slim.format import SlimSpec
from deadweight.source.model import Source
from deadweight.source.printable import printable
from deadweight.train.launch import first_process

NEIGHBOURS = (0.1, 0.125, 0.19, 0.25, 0.375, 0.53)  # sizes that a model card compares
HEALING_STEP = 65_536  # tokens of a step of healing on a GPU
GRADED = 1  # gradients are taken for one batch in this many
HELD, JUDGED = "held-back calibration text", "judgement text"


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose cache was measured, and the held-out texts on which its loss is measured."""

    source: Source
    caches: tuple[MeasuredCache, ...]
    options: CacheOptions
    calibration: Calibration
    texts: dict[str, tuple[Batch, ...]]
    precision: torch.dtype

    @property
    def tokens(self) -> int:
        """The sequence length for which shares of the cache are computed: that of the longest calibration window."""
        return longest(self.calibration.measure)


@dataclass(frozen=True)
class Coded:
    """A model with a coded cache, how it is built, and its loss."""

    module: nn.Module
    slim: SlimSpec
    plan: Allocation
    point: CurvePoint


def longest(batches: Sequence[Batch]) -> int:
    return max(int(batch["input_ids"].shape[1]) for batch in batches)


def expect_cache(source: Source) -> None:
    """Raise if the cache of a model cannot be coded."""
    name = printable(source.name)
    if not hasattr(source.module, "generate"):
        raise DeadweightError(f"{name} has no key-value cache; use --keep-attention")
    if getattr(source.config, "is_encoder_decoder", False) and "input_ids" not in source.kwargs:
        raise DeadweightError(
            f"{name} is a decoder behind an encoder that does not read tokens; expected one that does: shares of its "
            "cache would have no common length. Use --keep-attention"
        )
    expect_constant_rates(source.config)


def measure_model(job: CompressionJob) -> MeasuredModel:
    """Locate every attention and measure what it caches."""
    source, settings, progress = job.source, job.settings, job.progress
    settings.refuse_head_options()
    expect_cache(source)
    progress("looking for heads", 0, 0)
    attentions, watch = find_caches(source, live=isinstance(job.model, nn.Module))
    text = cache_calibration(source, job.model, settings.calibration)
    rates = measure_rates(source.module, attentions, text.measure[0], watch)
    known = {h.path: empty_moments(h, rates.get(h.path)) for h in attentions}
    of = len(text.measure)
    measure(
        source.module,
        CacheRecorder,
        known,
        text.measure,
        tick=lambda n: progress("measuring", n, of),
        most=GRADED,
        watch=watch,
    )
    texts = {HELD: text.judge}
    if settings.judge_text is not None:
        length = longest(text.measure)
        texts[JUDGED] = judge_batches(source, job.model, settings.judge_text, settings.windows, length)
    caches = tuple(known.pop(path).measured() for path in list(known))
    return MeasuredModel(source, caches, CacheOptions(caches, settings.keys), text, texts, job.precision)


def empty_moments(heads: Heads, rates: Tensor | None) -> CacheMoments:
    """Sums over zero tokens. All key heads of a small attention form one set; in a large one, each is a set."""
    small = heads.key_heads * (heads.d_qk + heads.d_v) <= SMALL
    return CacheMoments.empty(heads, rates, 1 if small else heads.key_heads)


def code_and_judge(work: MeasuredModel, share: float) -> Coded:
    """The model with a cache of this share, and its loss on held-out text."""
    plan = allocate(work.options, min(share, 1.0), work.tokens)
    module, slim = with_coded_cache(work.source.module, plan, work.precision)
    own_reader = any(cache.heads.form is not None for cache in work.caches)
    with expecting_states(work.source.name) if own_reader else nullcontext():
        judgements = judge_texts(work, module)
    expect_finite(judgements, work.source.name)
    return Coded(module, slim, plan, CurvePoint(plan.share, plan.predicted, judgements))


def judge_texts(work: MeasuredModel, module: nn.Module) -> dict[str, Judgement]:
    original = work.source.module
    return {name: judge(original, module, batches, decoder=True) for name, batches in work.texts.items()}


def expect_finite(judgements: Mapping[str, Judgement], name: str) -> None:
    for text, judgement in judgements.items():
        if not math.isfinite(judgement.increase):
            raise DeadweightError(
                f"{printable(name)} has a loss on the {text} that is NaN or infinite, with its cache or with a coded "
                "one; expected a finite loss: nothing can be judged"
            )


def worst_rise(point: CurvePoint) -> float:
    return max(j.increase for j in point.judgements.values())


def smallest_within_loss(work: MeasuredModel, limit: float, progress: Progress) -> tuple[Coded, list[CurvePoint]]:
    """The smallest cache whose measured loss is within the limit on every text, by bisection; and all sizes tried."""
    shares = possible_shares(work)
    low, high, tries = 0, len(shares) - 1, 0
    best: Coded | None = None
    tried = []
    while low <= high:
        middle = (low + high) // 2
        tries += 1
        progress("trying sizes", tries, 4)
        attempt = code_and_judge(work, shares[middle])
        tried.append(attempt.point)
        if worst_rise(attempt.point) <= limit:
            best, high = attempt, middle - 1
        else:
            low = middle + 1
    if best is None:
        raise DeadweightError(
            f"found --max-loss {limit}; a cache of 8 bits costs {worst_rise(attempt.point):.4f} nats per token: "
            "expected more, or leave the cache as it is"
        )
    return best, [point for point in tried if point is not best.point]


def possible_shares(work: MeasuredModel) -> list[float]:
    """The shares of `CURVE_SHARES` that leave bytes for codes, after the uncoded tokens and the scales."""
    least = sum(work.options.unit_bytes(i) for i in range(len(work.caches)))
    return [s for s in CURVE_SHARES if bytes_for_units(work.caches, s, work.tokens) >= least] or [LARGEST]


def predict_sizes(work: MeasuredModel, chosen: float) -> list[CurvePoint]:
    """The predicted loss of caches of other sizes, without running the model."""
    shares = [share for share in possible_shares(work) if share in NEIGHBOURS and abs(share - chosen) > 0.01]
    plans = [allocate(work.options, share, work.tokens) for share in shares]
    return [CurvePoint(plan.share, plan.predicted, {}) for plan in plans]


def judge_many_sizes(work: MeasuredModel, progress: Progress) -> list[Coded]:
    """The losses of models with caches of many sizes, the smallest first."""
    shares = possible_shares(work)
    points = []
    for n, share in enumerate(shares):
        progress("judging sizes", n, len(shares))
        points.append(code_and_judge(work, share))
    return points


def compress_cache(job: CompressionJob) -> CacheCompression:
    """Measure the cache of a model once, code it at the requested size, judge, heal and write it."""
    start = time.perf_counter()
    source, target, settings, progress = job.source, job.target, job.settings, job.progress
    work = measure_model(job)
    if settings.curve:
        points = judge_many_sizes(work, progress)
        expect_same_decoded(source.module, points[-1].module, work.calibration.judge[0], source.name)
        return describe(work, points, settings, time.perf_counter() - start)
    if settings.max_loss is not None:
        choice, beside = smallest_within_loss(work, settings.max_loss, progress)
    else:
        progress("judging", 0, 0)
        choice = code_and_judge(work, USUAL_CACHE if settings.share is None else settings.share)
        beside = [] if target is None else predict_sizes(work, choice.point.share)
    expect_same_decoded(source.module, choice.module, work.calibration.judge[0], source.name)
    unhealed = choice.point
    healed = Healed(0)
    if settings.heal:
        choice, healed = heal(job, work, choice)
    result = describe(work, [choice], settings, time.perf_counter() - start)
    result = replace(
        result,
        beside=tuple(beside),
        notes=(*result.notes, *healed.notes),
        healed=healed.steps,
        before_healing=unhealed if settings.heal else None,
    )
    if target is not None and first_process():
        progress("writing", 0, 0)
        write(job, choice, result, target)
    return replace(result, module=choice.module if target is None else None, seconds=time.perf_counter() - start)


def heal(job: CompressionJob, work: MeasuredModel, choice: Coded) -> tuple[Coded, Healed]:
    """Distil from the original with a coded cache; gradients pass through rounding unchanged (straight-through)."""
    original, settings = work.source.module, job.settings
    on_gpu = device_of(original).type == "cuda"
    healing = Healing(
        settings.heal,
        settings.heal_rate or CACHE_RATE,
        tokens=settings.heal_tokens or (HEALING_STEP if on_gpu else 0),
        blockwise=0,
    )
    texts = (settings.text, settings.heal_text)
    batches = text_to_heal_on(work.source, job.model, *texts, work.calibration, healing.steps, healing.tokens)
    if job.target is not None:
        same = (healing, choice.slim.to_json())
        healing = replace(healing, folder=healing_folder(job.target, original, batches, same))
    healed = heal_or_undo(original, choice.module, batches, healing, job.progress)
    judgements = judge_texts(work, choice.module)
    return replace(choice, point=replace(choice.point, judgements=judgements)), healed


def describe(work: MeasuredModel, points: Sequence[Coded], settings: Settings, seconds: float) -> CacheCompression:
    asked = None if settings.max_loss is not None or settings.curve else settings.share or USUAL_CACHE
    return CacheCompression(
        model=work.source.name,
        asked=asked,
        tokens=work.tokens,
        calibration_tokens=work.calibration.tokens,
        points=tuple(p.point for p in points),
        caches=points[-1].plan.specs,
        notes=(
            *work.source.notes,
            *work.calibration.notes,
            *notes_on(work, asked, points[-1].plan.share),
            *notes_on_halves(work, points),
        ),
        seconds=seconds,
    )


def notes_on(work: MeasuredModel, asked: float | None, share: float) -> list[str]:
    notes = notes_on_form(work.caches, share)
    unclear = [c.heads for c in work.caches if c.heads.keys_unclear]
    if unclear:
        notes.append(
            f"the keys of {len(unclear)} attentions, {unclear[0].path} among them, are coded with their rotary "
            f"positions: {unclear[0].keys_unclear}; that costs more"
        )
    if asked is not None and asked > LARGEST:
        notes.append("8 bits are as good as 16 here: no coordinate has more")
    return notes


def notes_on_form(caches: Sequence[MeasuredCache], share: float) -> list[str]:
    """What a share is a share of, where that is not what attention reads, or not what the model itself caches."""
    cached = sum(c.heads.key_heads * (c.heads.d_qk + c.heads.d_v) for c in caches)
    read = sum(c.heads.form.expanded for c in caches if c.heads.form is not None)
    copies = max(1 if c.heads.form is None else c.heads.form.copies for c in caches)
    notes = []
    if copies > 1:
        notes.append(f"shares are of a cache with every key head once; the model's own cache has up to {copies} copies")
    elif read > cached:
        notes.append(
            f"shares are of the {cached:,} numbers per token that the model caches; of the {read:,} numbers that "
            f"attention reads, which are made from them, this cache takes {share * cached / read:.2%}"
        )
    return notes


def notes_on_halves(work: MeasuredModel, points: Sequence[Coded]) -> list[str]:
    """Where `--keys half` brings nothing: with 1 or 3 codes of keys, the halves of a unit cannot be those of a head."""
    if work.options.structure != "half" or len(points) > 1:
        return []
    specs = points[-1].plan.specs
    odd = [path for path, spec in specs.items() if spec.key_fields % 2]
    if not odd:
        return []
    return [
        f"--keys half decodes no faster than --keys head in {len(odd)} of {len(specs)} attentions at this size, "
        f"{odd[0]} among them: their units hold an odd number of codes of keys; try --keys head, or another size"
    ]


def write(job: CompressionJob, choice: Coded, result: CacheCompression, target: Path) -> None:
    source = job.source
    model = CompressedModel(
        choice.module, type(source.module), choice.slim, source.config, changes=None, precision=job.precision
    )
    write_compressed(
        model,
        target,
        folder=job.folder,
        manifest=cache_data(result),
        card=cache_card(result),
        overwrite=job.settings.overwrite,
    )
