"""Which dimensions heads keep for a share of the attention weights, and the model with these heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from deadweight.compress.calibration import Calibration
from deadweight.compress.locate import Heads
from deadweight.compress.settings import Settings
from deadweight.compress.slim_form import assemble_slim
from deadweight.compress.stock_heads import choose_one_size, computes_the_same, is_expressible, pack_model
from deadweight.compress.streaming import float_of
from deadweight.compress.truncate import HeadSpaces, truncate_model
from deadweight.compress.weight_budget import PricedSpace, Ranks, attention_weights, choose_ranks, priced_spaces
from deadweight.slim.format import SlimSpec
from deadweight.source.model import Source
from deadweight.source.type_aliases import JsonObject

STEPS = 16  # parts of a head dimension: by default sizes are multiples of one of them
STOCK_STEPS = 8  # the same for heads of one dimension


@dataclass(frozen=True)
class MeasuredHeads:
    """A model whose heads were measured."""

    source: Source
    spaces: tuple[HeadSpaces, ...]
    pair_moments: dict[str, Tensor]  # by attention, for stock heads
    calibration: Calibration
    settings: Settings

    @property
    def attentions(self) -> tuple[Heads, ...]:
        return tuple(s.heads for s in self.spaces)

    @property
    def priced(self) -> list[PricedSpace]:
        step = self.settings.step
        sizes = [(s, step or usual_step(s.heads.d_qk)) for s in self.spaces]
        return [priced for s, each in sizes for priced in priced_spaces(s, self.source.module, each)]


def usual_step(head_dimension: int) -> int:
    return max(1, head_dimension // STEPS)


@dataclass(frozen=True)
class Chosen:
    """A model with smaller heads: its spec if it is slim, else the changes to its config; and the kept dimensions."""

    module: nn.Module
    ranks: Ranks
    slim: SlimSpec | None = None
    config: JsonObject | None = None


def choose_by_share(work: MeasuredHeads, share: float) -> Chosen:
    """The model with the least predicted loss that keeps this share of its attention weights."""
    original, stock = work.source.module, work.settings.layout == "stock"
    if stock and is_expressible(work.source.config, work.spaces):
        whole = work.attentions[0].d_qk
        step = max(2, whole // STOCK_STEPS)
        size = int(share * whole) // step * step
        if size and (choice := choose_stock_heads(work, size)) is not None:
            return choice
    total = attention_weights(work.attentions, original)
    ranks = choose_ranks(work.priced, work.attentions, share, total, work.settings.method)
    if stock:
        padded = truncate_model(original, work.spaces, ranks.kept, bias=False, precision=float_of(original))
        return Chosen(padded.module, ranks)
    module, slim = assemble_slim(truncate_model(original, work.spaces, ranks.kept, bias=True))
    return Chosen(module, ranks, slim)


def choose_stock_heads(work: MeasuredHeads, size: int) -> Chosen | None:
    """Heads of one dimension, in a config that plain transformers reads; None if that would change the function."""
    original = work.source.module
    one = choose_one_size(work.spaces, work.pair_moments, size)
    padded = truncate_model(original, one.spaces, one.kept, bias=False, precision=float_of(original)).module
    module, changes = pack_model(padded, one)
    if not computes_the_same(padded, module, work.calibration.judge[0]):
        return None
    return Chosen(module, Ranks(one.kept, one.loss, size / work.attentions[0].d_qk), config=changes)


def notes_on(choice: Chosen) -> tuple[str, ...]:
    """What a user of a stock checkpoint should know."""
    if choice.slim is not None:
        return ()
    if choice.config is not None:
        return (f"stock: all heads have {choice.config['head_dim']} dimensions; slim gives each its own, at less loss",)
    return ("stock: heads keep their size and hold zeros; the cache is as large as before (slim makes it smaller)",)
