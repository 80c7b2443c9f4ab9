"""How far the softmax of every head saturates: the norm of its Jacobian by context length, measured on a text.

A causal model reads windows of the longest length once: its row at position n − 1 has n keys. Other models read the
start of each window again for every length, with the special tokens at its ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deadweight.compress.attention_calls import Observer, observing
from deadweight.compress.calibration import EMBEDDED, edges, token_windows, tokenizer_for
from deadweight.compress.streaming import device_of
from deadweight.errors import DeadweightError
from deadweight.notebook import Shown
from deadweight.progress import Progress, silent
from deadweight.saturation.attention_rows import Causality, RowObserver, sample_positions
from deadweight.saturation.slopes import FEWEST, LayerSlopes, factors, layer_of
from deadweight.source.model import Source, open_complete
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import Keywords, ModelLike

SHORTEST, USUAL = 4, 1024  # keys of a row: the shortest length, and the default of the longest
AT_A_TIME = 4096  # tokens per batch


@dataclass(frozen=True)
class Saturation(Shown):
    """Every layer and head of a model on a text."""

    model: str
    text: str
    lengths: tuple[int, ...]
    windows: int
    rows: int  # per window and length, at most
    seed: int
    layers: tuple[LayerSlopes, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def factors(self) -> tuple[float, ...]:
        return factors(self.layers)


@dataclass(frozen=True)
class Reading:
    """Token windows of one length in batches, and the positions sampled in them for each length."""

    batches: tuple[dict[str, Tensor], ...]
    places: dict[int, Tensor]


def saturation(
    model: ModelLike,
    text: str = "embedded",
    *,
    length: int | None = None,
    windows: int = 8,
    rows: int = 16,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Saturation:
    """Measure the softmax of every head at lengths 4, 8, … up to `length` (default: 1024, or the model's context).

    The model reads `windows` windows of the text; in each, at most `rows` rows are sampled for every length.
    """
    source = open_complete(model, trust_remote_code=trust_remote_code)
    causal = check_causality(source)
    lengths = lengths_up_to(length or usual_length(source))
    check_counts(windows, rows)
    ids = token_windows(source, model, text, windows, lengths[-1])
    places = {n: sample_positions(n, rows, seed, causal=causal) for n in lengths}
    plan = readings(source, model, ids, places, causal=causal)
    if torch.cuda.is_available():
        source.module.to("cuda")
    by_path = measure_rows(source, plan, causal, progress)
    layers = tuple(layer_of(path, {n: torch.cat(parts) for n, parts in by.items()}) for path, by in by_path.items())
    notes = make_notes(text, windows, ids, layers)
    return Saturation(source.name, text, lengths, len(ids), rows, seed, layers, notes)


def make_notes(text: str, windows: int, ids: Tensor, layers: tuple[LayerSlopes, ...]) -> tuple[str, ...]:
    notes = [EMBEDDED.replace("calibrated", "measured")] if text == "embedded" else []
    if len(ids) < windows:
        notes.append(f"the text is long enough for {len(ids)} windows of {ids.shape[1]:,} tokens, not for {windows}")
    near = [i for i, layer in enumerate(layers) if layer.heads[0].by_length[-1].length < ids.shape[1]]
    if near:
        longest = max(layers[i].heads[0].by_length[-1].length for i in near)
        named = ", ".join(map(str, near))
        notes.append(f"layer {named} has a sliding window: its longest rows have {longest:,} keys")
    return tuple(notes)


def check_causality(source: Source) -> bool:
    """Whether the model is causal; an error if it has no attention to measure."""
    if "input_ids" not in source.kwargs:
        raise DeadweightError(f"{printable(source.name)} does not take input_ids; expected a language model")
    causality = Causality()
    run_observed(source, causality, source.kwargs)
    if not causality.paths:
        raise DeadweightError(
            f"{printable(source.name)} does not call softmax attention through transformers' attention interface; "
            "expected a model that does"
        )
    return causality.causal


@torch.no_grad()
def run_observed(source: Source, observer: Observer, kwargs: Keywords) -> None:
    """Run the model on one batch with an observer; only the last logits are computed, where the model allows it."""
    accepted = inspect.signature(source.module.forward).parameters
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    try:
        with observing(source.module, observer):
            source.module(**kwargs, **fewer)
    except NotImplementedError as error:
        raise DeadweightError(f"{printable(source.name)} has {error}; its heads cannot be observed") from error
    except (IndexError, RuntimeError) as error:
        size = kwargs["input_ids"].shape[1]
        raise DeadweightError(
            f"{printable(source.name)} fails on windows of {size:,} tokens ({reason(error)}); try a smaller --length"
        ) from error


def usual_length(source: Source) -> int:
    """The largest power of two within the context."""
    context = int(getattr(source.config, "max_position_embeddings", None) or 512)
    return 1 << (min(USUAL, context).bit_length() - 1)


def lengths_up_to(longest: int) -> tuple[int, ...]:
    if longest < SHORTEST << (FEWEST - 1):
        raise DeadweightError(
            f"found a longest length of {longest}; expected {SHORTEST << (FEWEST - 1)} or more: a slope needs {FEWEST} "
            f"lengths, from {SHORTEST} on"
        )
    powers = [SHORTEST << i for i in range((longest // SHORTEST).bit_length())]
    return (*powers, *([longest] if longest != powers[-1] else []))


def check_counts(windows: int, rows: int) -> None:
    if windows < 2:
        raise DeadweightError(f"found {windows} windows; expected two or more: the standard error is their spread")
    if rows < 1:
        raise DeadweightError(f"found {rows} rows for each length; expected one or more")


def readings(
    source: Source, model: ModelLike, ids: Tensor, places: dict[int, Tensor], *, causal: bool
) -> tuple[Reading, ...]:
    """The windows to read: the long ones once, or the start of each for every length of `places`."""
    if causal:
        return (Reading(batches(source, ids), places),)
    tail = len(edges(source, tokenizer_for(source, model)[0])[1])
    longest = ids.shape[1]
    short = {n: torch.cat([ids[:, : n - tail], ids[:, longest - tail :]], 1) for n in places}
    return tuple(Reading(batches(source, short[n]), {n: places[n]}) for n in places)


def batches(source: Source, ids: Tensor) -> tuple[dict[str, Tensor], ...]:
    parts = ids.split(max(1, AT_A_TIME // ids.shape[1]))
    both = bool(getattr(source.config, "is_encoder_decoder", False))
    return tuple({"input_ids": p} | ({"decoder_input_ids": p} if both else {}) for p in parts)


def measure_rows(
    source: Source, plan: tuple[Reading, ...], causal: bool, progress: Progress
) -> dict[str, dict[int, list[Tensor]]]:
    """The rows of every attention, by length."""
    total = sum(len(reading.batches) for reading in plan)
    result: dict[str, dict[int, list[Tensor]]] = {}
    for done, (reading, batch) in enumerate(each(plan)):
        progress("reading", done, total)
        rows = RowObserver(reading.places, causal=causal)
        run_observed(source, rows, {name: t.to(device_of(source.module)) for name, t in batch.items()})
        for path, by_length in rows.rows.items():
            for length, parts in by_length.items():
                result.setdefault(path, {}).setdefault(length, []).extend(parts)
    progress("reading", total, total)
    return result


def each(plan: tuple[Reading, ...]) -> Iterator[tuple[Reading, dict[str, Tensor]]]:
    for reading in plan:
        for batch in reading.batches:
            yield reading, batch
