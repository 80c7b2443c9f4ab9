"""Smaller heads, stage by stage: locate, measure, choose, judge, heal, write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.compress.budget import cached_numbers
from deadweight.compress.calibration import Calibration, calibration, text_to_heal_on
from deadweight.compress.choose import Chosen, Work, by_share, notes_on
from deadweight.compress.heal import heal_or_undo, healing_place
from deadweight.compress.job import Job
from deadweight.compress.judge import called, judge
from deadweight.compress.locate import Heads, locate
from deadweight.compress.manifest import as_data, card
from deadweight.compress.moments import HeadMoments, measure
from deadweight.compress.observe import attend_alike
from deadweight.compress.result import Compression, Judgement
from deadweight.compress.spaces import reasons_left_whole, spaces_of
from deadweight.compress.streaming import device_of
from deadweight.compress.truncate import HeadSpaces
from deadweight.errors import DeadweightError
from deadweight.save.compressed import write_compressed
from deadweight.source.hugging import local_folder
from deadweight.source.text import printable, reason
from deadweight.train.launch import first_process

USUAL = 0.75  # of the attention weights, if nothing else is asked for


def compress_heads(job: Job) -> Compression:
    """Keep of every head the dimensions that matter most, measured on text, within one budget."""
    start = time.perf_counter()
    original, settings = job.source.module, job.settings
    job.progress("looking for heads", 0, 0)
    attentions = locate(job.source)
    attend_alike(original)
    text = calibration(
        job.source,
        job.model,
        text=settings.text,
        inputs=settings.inputs,
        windows=settings.windows,
        length=settings.length,
        batch=settings.batch,
    )
    forward = forward_seconds(original, text)
    work = measure_heads(job, attentions, text)
    choice = by_share(work, USUAL if settings.keep_attention is None else settings.keep_attention)
    job.progress("judging", 0, 0)
    result = describe(work, choice, judge(original, choice.module, text.judge))
    if settings.heal:
        result = heal(job, work, choice, result)
    result = replace(result, seconds_forward=forward, seconds=time.perf_counter() - start)
    if job.target is not None and first_process():
        job.progress("writing", 0, 0)
        write(job, choice, result, job.target)
    return replace(result, seconds=time.perf_counter() - start)


def measure_heads(job: Job, attentions: Sequence[Heads], text: Calibration) -> Work:
    """The spaces of all attentions, and for stock heads the moments of their rotary pairs."""
    original, stock, of = job.source.module, job.settings.layout == "stock", len(text.measure)
    empty = {heads.path: HeadMoments.empty(heads) for heads in attentions}
    moments = measure(original, empty, text.measure, tick=lambda n: job.progress("measuring", n, of))
    spaces, pairs = [], {}
    for n, heads in enumerate(attentions):
        job.progress("finding the best dimensions", n, len(attentions))
        mean = moments.pop(heads.path).mean()
        spaces.append(spaces_of(heads, mean, original, bias=not stock))
        if stock:
            pairs[heads.path] = mean.pairs
    if all(x is None for s in spaces for x in (*s.values, *s.non_rotary, *s.pairs)):
        reasons = sorted({reason for s in spaces for reason in reasons_left_whole(s)})
        raise DeadweightError(f"{printable(job.source.name)}: no head can be cut ({'; '.join(reasons)})")
    return Work(job.source, tuple(spaces), pairs, text, job.settings)


def heal(job: Job, work: Work, choice: Chosen, result: Compression) -> Compression:
    """Distil from the original, in place, unless that makes it worse."""
    original, settings, text = job.source.module, job.settings, work.calibration
    start = time.perf_counter()
    batches = text_to_heal_on(job.source, job.model, settings.text, settings.heal_text, text, settings.heal)
    same = (settings.heal, settings.heal_rate, settings.layout, result.kept)
    place = None if job.target is None else healing_place(job.target, original, batches, same)
    undone = heal_or_undo(
        original, choice.module, batches, settings.heal, rate=settings.heal_rate, place=place, progress=job.progress
    )
    seconds = time.perf_counter() - start
    return replace(
        result,
        judgement=judge(original, choice.module, text.judge),
        judgement_before_healing=result.judgement,
        healed=0 if undone else settings.heal,
        seconds_healing=seconds,
        notes=(*result.notes, *undone),
    )


def describe(work: Work, choice: Chosen, judgement: Judgement) -> Compression:
    """What was chosen, and what it costs."""
    kept = choice.ranks.kept
    return Compression(
        model=work.source.name,
        layout=work.settings.layout,
        share=choice.ranks.share,
        kept=kept,
        head_sizes={heads.path: (heads.d_qk, heads.d_v) for heads in work.attentions},
        kv_before=cached_numbers(work.attentions),
        kv_after=sum(sum(k.keys) + sum(k.values) for k in kept.values()),
        parameters_before=n_parameters(work.source.module),
        parameters_after=n_parameters(choice.module),
        predicted=choice.ranks.predicted,
        judgement=judgement,
        tokens=work.calibration.tokens,
        notes=(*work.source.notes, *work.calibration.notes, *notes_on(choice)),
        left_alone=left_alone(work.spaces),
        module=choice.module,
        slim=choice.slim,
        asked=work.settings.keep_attention,
    )


def left_alone(spaces: Sequence[HeadSpaces]) -> dict[str, str]:
    reasons = {s.heads.path: reasons_left_whole(s) for s in spaces}
    return {path: "; ".join(why) for path, why in reasons.items() if why}


def write(job: Job, choice: Chosen, result: Compression, target: Path) -> None:
    config = job.source.config if choice.config is None else getattr(choice.module, "config", None)
    write_compressed(
        choice.module,
        choice.slim,
        as_data(result),
        partial(card, result),
        target,
        folder=local_folder(str(job.model)) if isinstance(job.model, (str, Path)) else None,
        config=config,
        changes=choice.config,
        cls=type(job.source.module),
        precision=job.precision,
        overwrite=job.settings.overwrite,
    )


@torch.no_grad()
def forward_seconds(module: nn.Module, text: Calibration) -> float:
    """How long a forward pass over all calibration inputs takes: one row is timed, when it runs for the second time."""
    row = {name: x[:1] if isinstance(x, Tensor) else x for name, x in text.measure[-1].items()}
    try:
        called(module, row)
        wait_for_gpu(module)
        start = time.perf_counter()
        called(module, row)
        wait_for_gpu(module)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise DeadweightError(
            f"the model does not run on the calibration inputs ({reason(error)}); expected its own arguments, by "
            "name, a row for each sample"
        ) from error
    seconds = time.perf_counter() - start
    return seconds * sum(len(next(iter(b.values()))) for b in text.measure)


def wait_for_gpu(module: nn.Module) -> None:
    if (device := device_of(module)).type == "cuda":
        torch.cuda.synchronize(device)


def n_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
