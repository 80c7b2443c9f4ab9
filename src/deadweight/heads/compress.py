"""Compressing heads, stage by stage: locate, measure, rank, cut, heal, judge, write."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deadweight.audit.run import threads_for
from deadweight.errors import DeadweightError
from deadweight.heads.assemble import assembled
from deadweight.heads.budget import Budget, Method, Ranks, Slot, ranked, slots_of, spaces_of, total_cost
from deadweight.heads.calibration import Batch, Calibration, calibration, more_text
from deadweight.heads.heal import healed
from deadweight.heads.judge import called, judge
from deadweight.heads.locate import Heads, float_of, locate
from deadweight.heads.moments import Moments, measure
from deadweight.heads.one_size import expressible, of_one_size, packed, same
from deadweight.heads.result import Compression
from deadweight.heads.truncate import Cut, Spaces, cut
from deadweight.report.compression import places_kept
from deadweight.save.compressed import write_compressed
from deadweight.save.folder import followed
from deadweight.save.write import check_out
from deadweight.source.hugging import is_slim, local_folder
from deadweight.source.model import Source, open_complete
from deadweight.source.text import printable

Layout = Literal["slim", "stock"]
Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
WIDEST = 512  # dimensions of values that merged heads may share
SHARES = tuple(i / 20 for i in range(1, 21))  # of the cache: what --max-loss tries


def compress(
    model: Any,
    out: str | Path | None = None,
    *,
    keep_kv: float | None = None,
    keep_attention: float | None = None,
    max_loss: float | None = None,
    text: str | None = None,
    inputs: Any = None,
    layout: Layout = "slim",
    method: Method = "knapsack",
    windows: int = 64,
    length: int | None = None,
    batch: int = 4,
    step: int | None = None,
    merge: int | None = None,
    heal: int = 0,
    device: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda what, done, of: None,
) -> Compression:
    """Keep of every head the dimensions that matter most, measured on text, within one budget.

    One of `keep_kv` (share of the cache), `keep_attention` (share of the attention weights) and `max_loss` (nats per
    token that the loss may rise, measured) says how much. Without OUT the result's `module` is the compressed model.
    """
    start = time.perf_counter()
    target = None if out is None else followed(out)
    if target is not None:
        check_out(target, model, overwrite=overwrite)
    source, precision = opened(model, device)
    what = wanted(source, keep_kv, keep_attention, max_loss)
    share = keep_attention if what == "attention" else keep_kv
    if share is not None:
        Budget(what, share)
    with threads_for(count(source.module)):
        progress("looking for heads", 0, 0)
        attentions = locate(source)
        found = calibration(source, model, text=text, inputs=inputs, windows=windows, length=length, batch=batch)
        merges = {h.path: merged_heads(h, what, layout, merge) for h in attentions}
        spaces, planes, forward = measured(source, attentions, merges, found, layout, progress)
        work = Work(source, spaces, planes, found, what, method, layout, step)
        chosen, ranks = by_loss(work, max_loss, progress) if max_loss is not None else by_share(work, share or 0.75)
        progress("judging", 0, 0)
        judged = judge(source.module, chosen.module, found.judge)
        first = judged if heal else None
        undone: tuple[str, ...] = ()
        if heal:
            settings = (source.name, text, heal, windows, length, ranks.kept)
            place = None if target is None else healing_place(target, settings)
            batches = more_text(source, model, text, found, heal * batch)
            undone = heal_or_undo(source.module, chosen.module, batches, heal, place, progress)
            judged = judge(source.module, chosen.module, found.judge)
    result = Compression(
        model=source.name,
        layout=layout,
        what=what,
        asked=share,
        share=ranks.share,
        kept=ranks.kept,
        kv_before=total_cost(spaces, source.module, "kv"),
        kv_after=sum(sum(places_kept(k)) + sum(k.values) for k in ranks.kept.values()),
        parameters_before=count(source.module),
        parameters_after=count(chosen.module),
        predicted=ranks.predicted,
        judgement=judged,
        tokens=found.tokens,
        seconds=time.perf_counter() - start,
        seconds_forward=forward,
        notes=(*source.notes, *found.notes, *undone, *notes_on(layout, chosen)),
        left_alone=left_alone(spaces),
        healed=heal,
        judgement_before_healing=first,
        module=chosen.module,
        details={
            s.heads.path: (places_kept(ranks.kept[s.heads.path]), ranks.kept[s.heads.path].values, s.heads.d_qk)
            for s in spaces
        },
    )
    if target is not None:
        progress("writing", 0, 0)
        write_compressed(
            chosen.module,
            chosen.slim,
            result,
            target,
            folder=local_folder(str(model)) if isinstance(model, (str, Path)) else None,
            config=source.config if chosen.config is None else getattr(chosen.module, "config", None),
            changes=chosen.config,
            cls=type(source.module),
            precision=precision,
            overwrite=overwrite,
        )
    return replace(result, seconds=time.perf_counter() - start)


def heal_or_undo(
    original: nn.Module,
    compressed: nn.Module,
    batches: Sequence[Batch],
    steps: int,
    place: Path | None,
    progress: Progress,
) -> tuple[str, ...]:
    """Heal on all batches but one; if that one is worse off afterwards, put the weights back and say so."""
    kept = {name: tensor.detach().clone() for name, tensor in compressed.state_dict().items()}
    before = judge(original, compressed, batches[-1:]).error
    healed(original, compressed, batches[:-1] or batches, steps, place=place, progress=progress)
    after = judge(original, compressed, batches[-1:]).error
    if after <= before:
        return ()
    compressed.load_state_dict(kept)
    return (
        f"healing for {steps} steps was undone: on a batch set aside the error rose from {before:.2e} to {after:.2e}; "
        "it may take more steps, or more text",
    )


def healing_place(target: Path, settings: Any) -> Path:
    """Where healing keeps its state until it is done: beside OUT, and only for a run with the same settings."""
    key = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return target.with_name(f".{target.name}.healing-{key}")


def opened(model: Any, device: str | None) -> tuple[Source, torch.dtype]:
    """The model in float32 on its device, and the precision that it came in."""
    source = open_complete(copy.deepcopy(model) if isinstance(model, nn.Module) else model)  # theirs stays as it is
    if source.config is None:
        raise DeadweightError(
            f"{printable(source.name)} is no model of transformers; expected one, whose attention can be looked into"
        )
    if is_slim(source.config):
        raise DeadweightError(
            f"{printable(source.name)} is slim already; expected an original or a stock checkpoint: compress that one"
        )
    precision = float_of(source.module)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source.module.to(where, torch.float32 if precision in (torch.float16, torch.bfloat16) else precision).eval()
    return source, precision


def wanted(source: Source, kv: float | None, attention: float | None, loss: float | None) -> Literal["kv", "attention"]:
    if sum(x is not None for x in (kv, attention, loss)) > 1:
        raise DeadweightError("found several budgets; expected one of keep_kv, keep_attention and max_loss")
    if loss is not None and not loss > 0:
        raise DeadweightError(f"found --max-loss {loss}; expected nats per token above 0: 0.02 is 2 % of perplexity")
    has_cache = hasattr(source.module, "generate")
    if kv is not None and not has_cache:
        raise DeadweightError(f"{printable(source.name)} has no cache, which --keep-kv is about; use --keep-attention")
    return "kv" if kv is not None or (attention is None and has_cache) else "attention"


def merged_heads(heads: Heads, what: str, layout: str, merge: int | None) -> int:
    """How many key heads share their values: as many as keep the shared space at WIDEST, where a cache is to shrink."""
    if what != "kv" or layout != "slim" or heads.value is None or heads.output is None:
        return 1
    divisors = [m for m in range(1, heads.key_heads + 1) if heads.key_heads % m == 0]
    if merge is not None:
        if merge not in divisors:
            raise DeadweightError(
                f"found --merge {merge}; {heads.path} has {heads.key_heads} key heads: expected one of "
                f"{', '.join(map(str, divisors))}"
            )
        return merge
    return max([m for m in divisors if m * heads.d_v <= WIDEST], default=1)


def measured(
    source: Source,
    attentions: Sequence[Heads],
    merges: dict[str, int],
    found: Calibration,
    layout: str,
    progress: Progress,
) -> tuple[list[Spaces], dict[str, Tensor], float]:
    """The spaces of all attentions, the moments of their planes, and how long a forward pass over all inputs takes."""
    forward = forward_seconds(source.module, found)
    empty = {h.path: Moments(h, merges[h.path]) for h in attentions}
    of = len(found.measure)
    moments = measure(source.module, empty, found.measure, tick=lambda n: progress("measuring", n, of))
    spaces = []
    for n, heads in enumerate(attentions):
        progress("finding the best dimensions", n, len(attentions))
        spaces.append(spaces_of(heads, moments[heads.path], source.module, bias=layout == "slim"))
    if layout == "stock":  # keys behind a norm can only be cut where the cache is packed
        spaces = [s if s.heads.query and s.heads.key else replace(s, planes=(None,) * len(s.planes)) for s in spaces]
    if all(x is None for s in spaces for x in (*s.values, *s.still, *s.planes)):
        raise DeadweightError(
            f"{printable(source.name)}: no head can be cut ({'; '.join(sorted(set(left_alone(spaces).values())))})"
        )
    return spaces, {path: m.planes for path, m in moments.items()}, forward


@torch.no_grad()
def forward_seconds(module: nn.Module, found: Calibration) -> float:
    """How long a forward pass over all calibration inputs takes: two batches are timed, the first is slow to start."""
    seconds = []
    for batch in found.measure[:2]:
        start = time.perf_counter()
        called(module, batch)
        seconds.append(time.perf_counter() - start)
    return min(seconds) * len(found.measure)


@dataclass(frozen=True)
class Work:
    """All that a choice of ranks starts from."""

    source: Source
    spaces: list[Spaces]
    planes: dict[str, Tensor]
    calibration: Calibration
    what: Literal["kv", "attention"]
    method: Method
    layout: Layout
    step: int | None

    @property
    def slots(self) -> list[Slot]:
        return [
            slot
            for s in self.spaces
            for slot in slots_of(s, self.source.module, self.what, self.step or max(1, s.heads.d_qk // 16))
        ]


@dataclass(frozen=True)
class Chosen:
    """A compressed model, the spec of its small layers if it is slim, and what is new in its config if it is not."""

    module: nn.Module
    slim: dict[str, Any] | None
    config: dict[str, Any] | None = None


def by_share(work: Work, share: float) -> tuple[Chosen, Ranks]:
    total = total_cost(work.spaces, work.source.module, work.what)
    if work.layout == "stock" and work.what == "kv" and expressible(work.source.config, work.spaces):
        whole = work.spaces[0].heads.d_qk
        size = int(share * whole) // max(2, whole // 8) * max(2, whole // 8)
        if size and (found := in_smaller_heads(work, size)) is not None:
            return found
    ranks = ranked(work.slots, work.spaces, Budget(work.what, share), total, work.method)
    made = cut(work.source.module, work.spaces, ranks.kept, bias=work.layout == "slim")
    return small(made, work.layout), ranks


def in_smaller_heads(work: Work, size: int) -> tuple[Chosen, Ranks] | None:
    """All heads of one size, in a config that plain transformers reads; None if that is not the same function."""
    spaces, kept, loss = of_one_size(work.spaces, work.planes, size)
    padded = cut(work.source.module, spaces, kept, bias=False).module
    module, changes = packed(padded, spaces, size)
    if not same(padded, module, work.calibration.judge[0]):
        return None
    return Chosen(module, None, changes), Ranks(kept, loss, size / spaces[0].heads.d_qk)


def small(made: Cut, layout: Layout) -> Chosen:
    if layout == "stock":
        return Chosen(made.module, None)
    return Chosen(*assembled(made))


def by_loss(work: Work, limit: float, progress: Progress) -> tuple[Chosen, Ranks]:
    """The smallest share whose measured loss stays within the limit, by bisection."""
    low, high = 0, len(SHARES) - 1
    best: tuple[Chosen, Ranks] | None = None
    tries = 0
    while low <= high:
        middle = (low + high) // 2
        tries += 1
        progress("trying shares", tries, 5)
        try:
            found = by_share(work, SHARES[middle])
        except DeadweightError:  # less than the heads can be cut to
            low = middle + 1
            continue
        rise = judge(work.source.module, found[0].module, work.calibration.judge).increase
        if rise <= limit:
            best, high = found, middle - 1
        else:
            low = middle + 1
    return best if best is not None else by_share(work, 1.0)


def left_alone(spaces: Sequence[Spaces]) -> dict[str, str]:
    found = {}
    for s in spaces:
        reasons = [s.heads.blind] if s.heads.blind else []
        if s.values[0] is None:
            reasons.append("its values are not made by a linear layer, or not read by one")
        if s.heads.still and s.still[0] is None and not s.heads.blind:
            reasons.append("its queries or keys pass a norm: only whole planes behind it can be left out")
        if s.heads.planes and s.planes[0] is None and not s.heads.blind:
            reasons.append("its keys pass a norm, so that their planes cannot be zero in a stock checkpoint")
        if reasons:
            found[s.heads.path] = "; ".join(reasons)
    return found


def notes_on(layout: str, chosen: Chosen) -> tuple[str, ...]:
    if layout != "stock":
        return ()
    if chosen.config is not None:
        return (f"stock: all heads have {chosen.config['head_dim']} dimensions; slim gives each its own, at less loss",)
    return ("stock: heads keep their size and hold zeros; the cache is as large as before (slim makes it smaller)",)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
