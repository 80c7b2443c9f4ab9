"""From measured spaces to a smaller model: for a share of what there is, or for a loss that may not be exceeded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from deadweight.compress.assemble import assembled
from deadweight.compress.budget import Budget, Method, Ranks, Slot, ranked, slots_of, total_cost
from deadweight.compress.calibration import Calibration
from deadweight.compress.judge import judge
from deadweight.compress.one_size import expressible, of_one_size, packed, same
from deadweight.compress.streaming import float_of
from deadweight.compress.truncate import Cut, Spaces, cut
from deadweight.errors import DeadweightError
from deadweight.progress import Progress
from deadweight.slim.format import SlimSpec
from deadweight.source.model import Source

Layout = Literal["slim", "stock"]
SHARES = tuple(i / 20 for i in range(1, 21))  # what --max-loss tries
ALIGNED = 8  # numbers that a GPU loads at once, in half precision


@dataclass(frozen=True)
class Work:
    """All that a choice starts from."""

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
            slot for s in self.spaces for slot in slots_of(s, self.source.module, self.what, self.step or usual_step(s))
        ]


def usual_step(spaces: Spaces) -> int:
    """A sixteenth of a head; of what heads share, as many numbers as are loaded at once, unless it is small."""
    size, shared = spaces.heads.d_qk, max(spaces.merged, spaces.joined)
    return max(1, size // 16, min(ALIGNED, shared * size // 16) if shared > 1 else 0)


@dataclass(frozen=True)
class Chosen:
    """A compressed model, the spec of its small layers if it is slim, and what is new in its config if it is not."""

    module: nn.Module
    slim: SlimSpec | None
    config: dict[str, Any] | None = None


def by_share(work: Work, share: float) -> tuple[Chosen, Ranks]:
    total = total_cost(work.spaces, work.source.module, work.what)
    if work.layout == "stock" and work.what == "kv" and expressible(work.source.config, work.spaces):
        whole = work.spaces[0].heads.d_qk
        size = int(share * whole) // max(2, whole // 8) * max(2, whole // 8)
        if size and (found := in_smaller_heads(work, size)) is not None:
            return found
    ranks = ranked(work.slots, work.spaces, Budget(work.what, share), total, work.method)
    precision = None if work.layout == "slim" else float_of(work.source.module)
    made = cut(work.source.module, work.spaces, ranks.kept, bias=work.layout == "slim", precision=precision)
    return small(made, work.layout), ranks


def in_smaller_heads(work: Work, size: int) -> tuple[Chosen, Ranks] | None:
    """All heads of one size, in a config that plain transformers reads; None if that is not the same function."""
    spaces, kept, loss = of_one_size(work.spaces, work.planes, size)
    padded = cut(work.source.module, spaces, kept, bias=False, precision=float_of(work.source.module)).module
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


def notes_on(layout: Layout, chosen: Chosen) -> tuple[str, ...]:
    if layout != "stock":
        return ()
    if chosen.config is not None:
        return (f"stock: all heads have {chosen.config['head_dim']} dimensions; slim gives each its own, at less loss",)
    return ("stock: heads keep their size and hold zeros; the cache is as large as before (slim makes it smaller)",)
