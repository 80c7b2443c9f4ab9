"""Compressing heads, stage by stage: locate, measure, rank, cut, heal, judge, write."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from deadweight.compress.budget import Ranks, spaces_of, total_cost
from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.calibration import Calibration, calibration, text_to_heal_on
from deadweight.compress.choose import Chosen, Work, by_loss, by_share, notes_on
from deadweight.compress.code_cache import compress_cache
from deadweight.compress.heal import heal_or_undo, healing_place
from deadweight.compress.judge import called, judge
from deadweight.compress.late import expect_steady, told_positions
from deadweight.compress.locate import Heads, locate
from deadweight.compress.manifest import as_data, card
from deadweight.compress.moments import Moments, measure
from deadweight.compress.observe import attend_alike
from deadweight.compress.result import Compression, Judgement
from deadweight.compress.scratch import spaces_aside
from deadweight.compress.settings import Settings
from deadweight.compress.streaming import device_of, float_of, gathered, stream
from deadweight.compress.truncate import Spaces
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.save.compressed import write_compressed
from deadweight.save.folder import check_out, followed
from deadweight.slim.format import SlimSpec
from deadweight.slim.load import is_slim, slim_class
from deadweight.source.hugging import local_folder
from deadweight.source.model import Source, open_complete
from deadweight.source.plain_text import check_text, read_text
from deadweight.source.text import printable, reason
from deadweight.threads import threads_for
from deadweight.train.launch import first_process

NOT_LATE = (
    "no keys are late: that takes a slim cache to be kept small (--keep-kv), several key heads, and rotary positions "
    "that the attention is told",
)
WIDEST = 512  # dimensions of values, or of keys, that heads may share
WIDEST_LATE = 192  # the same of more than two heads with late keys: every step expands what is kept to all of them


@torch.inference_mode(False)
@torch.enable_grad()  # gradients are measured, also for a caller who has switched them off
def compress(
    model: Any, out: str | Path | None = None, *, progress: Progress = silent, **options: Any
) -> Compression | CacheCompression:
    """Make the cache of a model, or its attention weights, smaller at a measured loss; `Settings` lists the options.

    Without OUT the result's `module` is the compressed model, in the precision that it was computed in; with OUT there
    is none: load the folder. What is needed in memory is one block of the model in float32, what passes between its
    blocks, and what is measured of its heads; healing needs the whole model twice.
    """
    try:
        settings = Settings(**options)
    except TypeError as error:
        raise DeadweightError(f"found an option that compress does not have ({reason(error)})") from error
    target = None if out is None else followed(out)
    if target is not None:
        check_out(target, model, overwrite=settings.overwrite)
    for text in (settings.heal_text, settings.judge_text):
        if text is not None:
            check_text(read_text(text), text)
    source, precision = opened(model, settings.device, settings.trust_remote_code)
    with threads_for(count(source.module)):
        if settings.is_coded:
            has_budget = settings.share is not None or settings.max_loss is not None or settings.curve
            if has_budget or hasattr(source.module, "generate"):
                result = compress_cache(source, model, target, settings, precision, progress)
                module = None if result.module is None else own_class(gathered(result.module), None, result)
                return replace(result, module=module)
    return compress_heads(source, model, target, settings, precision, progress)


def compress_heads(
    source: Source, model: Any, target: Path | None, settings: Settings, precision: torch.dtype, progress: Progress
) -> Compression:
    """Keep of every head the dimensions that matter most, measured on text, within one budget."""
    start = time.perf_counter()
    keep_kv, keep_attention, max_loss = settings.share, settings.keep_attention, settings.max_loss
    text, inputs, layout, method = settings.text, settings.inputs, settings.layout, settings.method
    windows, length, batch, step = settings.windows, settings.length, settings.batch, settings.step
    merge, late, heal, heal_text = settings.merge, settings.late, settings.heal, settings.heal_text
    heal_rate, overwrite = settings.heal_rate, settings.overwrite
    if late:
        expect_steady(source.config)
    what = wanted(source, keep_kv, keep_attention, max_loss)
    share = keep_attention if what == "attention" else keep_kv
    with threads_for(count(source.module)):
        progress("looking for heads", 0, 0)
        attentions = locate(source)
        attend_alike(source.module)
        found = calibration(source, model, text=text, inputs=inputs, windows=windows, length=length, batch=batch)
        forward = forward_seconds(source.module, found)
        told = told_positions(source.module, found.measure[0], [h.path for h in attentions]) if late else set()
        empty = {h.path: empty_moments(h, what, layout, merge, h.path in told) for h in attentions}
        spaces, planes = measured(source, empty, found, layout, None if target is None else target.parent, progress)
        work = Work(source, spaces, planes, found, what, method, layout, step)
        chosen, ranks = by_loss(work, max_loss, progress) if max_loss is not None else by_share(work, share or 0.75)
        progress("judging", 0, 0)
        before = judged = judge(source.module, chosen.module, found.judge)
        undone: tuple[str, ...] = ()
        healing = time.perf_counter()
        if heal:
            batches = text_to_heal_on(source, model, text, heal_text, found, heal)
            same = (heal, heal_rate, layout, ranks.kept)
            place = None if target is None else healing_place(target, source.module, batches, same)
            undone = heal_or_undo(
                source.module, chosen.module, batches, heal, rate=heal_rate, place=place, progress=progress
            )
            healing = time.perf_counter() - healing
            judged = judge(source.module, chosen.module, found.judge)
    result = replace(
        described(work, chosen, ranks, judged),
        asked=share,
        judgement_before_healing=before if heal else None,
        healed=0 if undone else heal,
        seconds_healing=healing if heal else 0.0,
        seconds_forward=forward,
        seconds=time.perf_counter() - start,
    )
    asked_for = NOT_LATE if late and not any(s.late for s in spaces) else ()
    result = replace(result, notes=(*result.notes, *asked_for, *undone))
    if target is not None and first_process():
        progress("writing", 0, 0)
        write_compressed(
            chosen.module,
            chosen.slim,
            as_data(result),
            partial(card, result),
            target,
            folder=local_folder(str(model)) if isinstance(model, (str, Path)) else None,
            config=source.config if chosen.config is None else getattr(chosen.module, "config", None),
            changes=chosen.config,
            cls=type(source.module),
            precision=precision,
            overwrite=overwrite,
        )
    module = own_class(gathered(chosen.module), chosen.slim) if target is None else None  # a folder is to be loaded
    return replace(result, module=module, seconds=time.perf_counter() - start)


def own_class(module: nn.Module, slim: SlimSpec | None, coded: CacheCompression | None = None) -> nn.Module:
    """A slim model in memory as one that is loaded: it says what it is, and so does what save_pretrained writes.

    One that is not slim needs none of our code.
    """
    slim = slim if coded is None else SlimSpec(caches=coded.caches)
    if slim is None:
        cast(Any, module).set_attn_implementation("eager")
    else:
        config: Any = copy.copy(module.config)
        config.deadweight = slim.to_json()
        for part in module.modules():
            if part.__dict__.get("config") is module.config and part is not module:
                part.config = config
        module.config, module.__class__ = config, slim_class(type(module))
    return module


def described(work: Work, chosen: Chosen, ranks: Ranks, judged: Judgement) -> Compression:
    """What was chosen, and what it costs."""
    module = work.source.module
    return Compression(
        model=work.source.name,
        layout=work.layout,
        what=work.what,
        share=ranks.share,
        kept=ranks.kept,
        head_sizes={s.heads.path: s.heads.d_qk for s in work.spaces},
        kv_before=total_cost(work.spaces, module, "kv"),
        kv_after=sum(sum(k.keys) + sum(k.values) for k in ranks.kept.values()),
        parameters_before=count(module),
        parameters_after=count(chosen.module),
        predicted=ranks.predicted,
        judgement=judged,
        tokens=work.calibration.tokens,
        notes=(*work.source.notes, *work.calibration.notes, *notes_on(work.layout, chosen)),
        left_alone=left_alone(work.spaces),
        module=chosen.module,
    )


def opened(model: Any, device: str | None, trust_remote_code: bool = False) -> tuple[Source, torch.dtype]:
    """The model, which computes in float32 on its device block by block, and the precision that it came in."""
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model  # theirs stays as it is
    source = open_complete(own, trust_remote_code=trust_remote_code)
    if source.config is None:
        raise DeadweightError(
            f"{printable(source.name)} is no model of transformers; expected one, whose attention can be looked into"
        )
    if is_slim(source.config):
        raise DeadweightError(
            f"{printable(source.name)} is slim already; expected an original or a stock checkpoint: compress that one"
        )
    precision = float_of(source.module)
    mine = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one of several processes has a device of its own
    where = device or (mine if torch.cuda.is_available() else "cpu")
    stream(source.module.eval(), torch.device(where), wide(precision))
    if not runs(source):  # it reads weights of parts that it does not call
        gathered(source.module)
    return source, precision


@torch.no_grad()
def runs(source: Source) -> bool:
    """Whether a streamed model runs as such on its example; if it would not run at all, that is said elsewhere."""
    args, kwargs = source.inputs.on(device_of(source.module), float_of(source.module))
    try:
        source.module(*args, **kwargs)
    except RuntimeError:
        return False
    except Exception:  # noqa: BLE001 - the model's own code
        return True
    return True


def wide(precision: torch.dtype) -> torch.dtype:
    """What to compute in: float32 for weights in half precision."""
    return torch.float32 if precision in (torch.float16, torch.bfloat16) else precision


def wanted(source: Source, kv: float | None, attention: float | None, loss: float | None) -> Literal["kv", "attention"]:
    has_cache = hasattr(source.module, "generate")
    if kv is not None and not has_cache:
        raise DeadweightError(f"{printable(source.name)} has no cache, which --keep-kv is about; use --keep-attention")
    return "kv" if kv is not None or (attention is None and has_cache) else "attention"


def empty_moments(heads: Heads, what: str, layout: str, merge: int | None, late: bool) -> Moments:
    """What is to be measured of one attention: how many of its heads share keys and values, and how."""
    late = late and bool(heads.planes)
    widest = max(WIDEST_LATE, 2 * heads.d_qk) if late else WIDEST
    joined = joined_heads(heads, what, layout, merge, widest)
    return Moments(heads, merged_heads(heads, what, layout, merge, widest), joined, late and joined > 1)


def merged_heads(heads: Heads, what: str, layout: str, merge: int | None, widest: int) -> int:
    """How many key heads share their values: where a cache is to shrink, and linear layers make and read them."""
    if what != "kv" or layout != "slim" or heads.value is None or heads.output is None:
        return 1
    return together(heads, heads.d_v, merge, widest)


def joined_heads(heads: Heads, what: str, layout: str, merge: int | None, widest: int) -> int:
    """How many key heads share their keys: the same, where linear layers make queries and keys."""
    if what != "kv" or layout != "slim" or heads.query is None or heads.key is None or heads.blind:
        return 1
    return together(heads, heads.d_qk, merge, widest)


def together(heads: Heads, size: int, merge: int | None, widest: int) -> int:
    """As many key heads as were asked for, or as keep what they share below a limit."""
    divisors = [m for m in range(1, heads.key_heads + 1) if heads.key_heads % m == 0]
    if merge is None:
        return max([m for m in divisors if m * size <= widest], default=1)
    if merge not in divisors:
        raise DeadweightError(
            f"found --merge {merge}; {heads.path} has {heads.key_heads} key heads: expected one of "
            f"{', '.join(map(str, divisors))}"
        )
    return merge


def measured(
    source: Source,
    empty: dict[str, Moments],
    found: Calibration,
    layout: str,
    scratch: Path | None,
    progress: Progress,
) -> tuple[list[Spaces], dict[str, Tensor]]:
    """The spaces of all attentions, and for stock heads the moments of their planes."""
    of, paths = len(found.measure), list(empty)
    moments = measure(source.module, empty, found.measure, tick=lambda n: progress("measuring", n, of))
    spaces, planes = [], {}
    for n, path in enumerate(paths):
        progress("finding the best dimensions", n, len(paths))
        here = moments.pop(path)
        spaces.append(spaces_aside(spaces_of(here.heads, here, source.module, bias=layout == "slim"), scratch))
        if layout == "stock":
            planes[path] = here.mean().planes
    if layout == "stock":  # keys behind a norm can only be cut where the cache is packed
        spaces = [s if s.heads.query and s.heads.key else replace(s, planes=(None,) * len(s.planes)) for s in spaces]
    if all(x is None for s in spaces for x in (*s.values, *s.still, *s.planes)):
        raise DeadweightError(
            f"{printable(source.name)}: no head can be cut ({'; '.join(sorted(set(left_alone(spaces).values())))})"
        )
    return spaces, planes


@torch.no_grad()
def forward_seconds(module: nn.Module, found: Calibration) -> float:
    """How long a forward pass over all calibration inputs takes: one row is timed, when it runs for the second time."""
    row = {name: x[:1] if isinstance(x, Tensor) else x for name, x in found.measure[-1].items()}
    try:
        called(module, row)
        finished(module)
        start = time.perf_counter()
        called(module, row)
        finished(module)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise DeadweightError(
            f"the model does not run on the calibration inputs ({reason(error)}); expected its own arguments, by "
            "name, a row for each sample"
        ) from error
    seconds = time.perf_counter() - start
    return seconds * sum(len(next(iter(b.values()))) for b in found.measure)


def finished(module: nn.Module) -> None:
    """Wait for what a GPU was asked to do."""
    if (device := device_of(module)).type == "cuda":
        torch.cuda.synchronize(device)


def left_alone(spaces: Sequence[Spaces]) -> dict[str, str]:
    found = {}
    for s in spaces:
        reasons = [s.heads.blind] if s.heads.blind else []
        if s.values[0] is None:
            reasons.append("its values are not made by a linear layer, or not read by one")
        if s.heads.still and s.still[0] is None and not s.heads.blind:
            reasons.append("its queries or keys pass a norm: only whole planes behind it can be left out")
        if s.heads.planes and s.planes[0] is None and not s.heads.blind and s.late is None:
            reasons.append("its keys pass a norm, so that their planes cannot be zero in a stock checkpoint")
        if reasons:
            found[s.heads.path] = "; ".join(reasons)
    return found


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
