"""Smaller heads, stage by stage: locate, measure, choose, judge, heal, write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.compress.attention_calls import use_our_attention
from deadweight.compress.calibration import Calibration, head_calibration, text_to_heal_on
from deadweight.compress.deadweight_json import heads_card, heads_data
from deadweight.compress.head_choice import Chosen, MeasuredHeads, choose_by_share, notes_on
from deadweight.compress.head_moments import HeadMoments, HeadRecorder
from deadweight.compress.head_spaces import find_head_spaces, reasons_left_whole
from deadweight.compress.heal import Healing, heal_or_undo, healing_folder
from deadweight.compress.job import CompressionJob
from deadweight.compress.judge import judge, run_model
from deadweight.compress.locate import Heads, locate
from deadweight.compress.measure import measure
from deadweight.compress.result import Compression, Judgement
from deadweight.compress.settings import HEAD_RATE, USUAL_ATTENTION
from deadweight.compress.streaming import device_of
from deadweight.compress.truncate import HeadSpaces
from deadweight.compress.weight_budget import cached_numbers
from deadweight.errors import DeadweightError
from deadweight.save.compressed_folder import CompressedModel, write_compressed
from deadweight.source.printable import printable, reason
from deadweight.train.launch import first_process


def compress_heads(job: CompressionJob) -> Compression:
    """Keep the dimensions of every head that matter most, measured on text, within one budget."""
    start = time.perf_counter()
    original, settings = job.source.module, job.settings
    job.progress("looking for heads", 0, 0)
    attentions = locate(job.source)
    use_our_attention(original)
    text = head_calibration(job.source, job.model, settings.calibration)
    forward = forward_seconds(original, text)
    work = measure_heads(job, attentions, text)
    choice = choose_by_share(work, USUAL_ATTENTION if settings.keep_attention is None else settings.keep_attention)
    job.progress("judging", 0, 0)
    result = describe(work, choice, judge(original, choice.module, text.judge))
    if settings.heal:
        result = heal(job, work, choice, result)
    result = replace(result, seconds_forward=forward, seconds=time.perf_counter() - start)
    if job.target is not None and first_process():
        job.progress("writing", 0, 0)
        write(job, choice, result, job.target)
    return replace(result, seconds=time.perf_counter() - start)


def measure_heads(job: CompressionJob, attentions: Sequence[Heads], text: Calibration) -> MeasuredHeads:
    """The spaces of all attentions, and for stock heads the moments of their rotary pairs."""
    original, stock, of = job.source.module, job.settings.layout == "stock", len(text.measure)
    empty = {heads.path: HeadMoments.empty(heads) for heads in attentions}
    moments = measure(original, HeadRecorder, empty, text.measure, tick=lambda n: job.progress("measuring", n, of))
    spaces, pairs = [], {}
    for n, heads in enumerate(attentions):
        job.progress("finding the best dimensions", n, len(attentions))
        mean = moments.pop(heads.path).mean()
        spaces.append(find_head_spaces(heads, mean, original, bias=not stock))
        if stock:
            pairs[heads.path] = mean.pairs
    if all(x is None for s in spaces for x in (*s.values, *s.non_rotary, *s.pairs)):
        reasons = sorted({reason for s in spaces for reason in reasons_left_whole(s)})
        raise DeadweightError(f"{printable(job.source.name)}: no head can be cut ({'; '.join(reasons)})")
    return MeasuredHeads(job.source, tuple(spaces), pairs, text, job.settings)


def heal(job: CompressionJob, work: MeasuredHeads, choice: Chosen, result: Compression) -> Compression:
    """Distil from the original, in place, unless that raises the loss."""
    original, settings, text = job.source.module, job.settings, work.calibration
    healing = Healing(settings.heal, settings.heal_rate or HEAD_RATE, tokens=settings.heal_tokens or 0)
    texts = (settings.text, settings.heal_text)
    batches = text_to_heal_on(job.source, job.model, *texts, text, healing.steps, healing.tokens)
    if job.target is not None:
        same = (healing, settings.layout, result.kept)
        healing = replace(healing, folder=healing_folder(job.target, original, batches, same))
    healed = heal_or_undo(original, choice.module, batches, healing, job.progress)
    return replace(
        result,
        judgement=judge(original, choice.module, text.judge),
        judgement_before_healing=result.judgement,
        healed=healed.steps,
        notes=(*result.notes, *healed.notes),
    )


def describe(work: MeasuredHeads, choice: Chosen, judgement: Judgement) -> Compression:
    """The result: what was kept, and the loss."""
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


def write(job: CompressionJob, choice: Chosen, result: Compression, target: Path) -> None:
    config = job.source.config if choice.config is None else getattr(choice.module, "config", None)
    model = CompressedModel(
        choice.module, type(job.source.module), choice.slim, config, changes=choice.config, precision=job.precision
    )
    write_compressed(
        model,
        target,
        folder=job.folder,
        manifest=heads_data(result),
        card=heads_card(result),
        overwrite=job.settings.overwrite,
    )


@torch.no_grad()
def forward_seconds(module: nn.Module, text: Calibration) -> float:
    """The time of a forward pass over all calibration inputs, estimated from the second run of one row."""
    row = {name: x[:1] if isinstance(x, Tensor) else x for name, x in text.measure[-1].items()}
    try:
        run_model(module, row)
        wait_for_gpu(module)
        start = time.perf_counter()
        run_model(module, row)
        wait_for_gpu(module)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise DeadweightError(
            f"the model does not run on the calibration inputs ({reason(error)}); expected tensors named "
            "like its arguments, one row per sample"
        ) from error
    seconds = time.perf_counter() - start
    return seconds * sum(len(next(iter(b.values()))) for b in text.measure)


def wait_for_gpu(module: nn.Module) -> None:
    if (device := device_of(module)).type == "cuda":
        torch.cuda.synchronize(device)


def n_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
