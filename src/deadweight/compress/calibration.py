"""Calibration inputs: windows of text, or other inputs; some are held out to measure the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deadweight.compress.calibration_mixture import SHARES, mixture
from deadweight.compress.padding import expect_masks, rows_of_one_length
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.source.hugging_face_config import local_folder
from deadweight.source.model import Source
from deadweight.source.plain_text import check_text, read_text
from deadweight.source.printable import printable, reason
from deadweight.source.tokens import encode_text, first_tokens, tokenizer_of

EMBEDDED = "calibrated on the prose that comes with Python: text like the model's own task is better (--text)"
MIXTURE = "calibrated on the mixture of texts that comes with the package (--text for your own)"
RANDOM = "calibrated on random inputs: give real ones (--inputs FILE.safetensors), or the measurement means little"
LONGEST = 1024  # tokens per window, by default
AT_A_TIME, MOST = 2048, 4  # tokens and windows per batch, by default
HELD_BACK = 0.125  # of the batches are held out
HEALED, PER = 8192, 64 << 30  # tokens of a batch of healing for every so many bytes of a GPU's memory, at least
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class CalibrationRequest:
    """Which text or inputs to calibrate on, and the number and size of the windows."""

    text: str | None = None  # None: text that comes with the package
    inputs: Any = None  # in place of text
    windows: int = 32
    length: int | None = None  # tokens of a window
    batch: int | None = None  # windows at a time

    def __post_init__(self) -> None:
        if self.windows < 2:
            raise DeadweightError(
                f"found {self.windows} calibration windows; expected two or more, because one is held out"
            )


@dataclass(frozen=True)
class Calibration:
    """Calibration and held-out batches, as keyword arguments of the model, and notes about them for the report."""

    measure: tuple[Batch, ...]
    judge: tuple[Batch, ...]
    tokens: int
    notes: tuple[str, ...] = ()


def head_calibration(source: Source, spec: Any, asked: CalibrationRequest) -> Calibration:
    """Windows of the text in the model's tokens; the last ones are held out.

    Heads truncated by measurements on short windows do worse at later positions: windows should be as long as the
    sequences that the model will read.
    """
    text, windows = asked.text, asked.windows
    if asked.inputs is not None:
        return split(batches_without_padding(source, given_inputs(asked.inputs), asked.batch or MOST))
    if text is None and "input_ids" not in source.kwargs:
        generator = torch.Generator().manual_seed(0)
        drawn = [source.draw(generator)[1] for _ in range(windows)]
        return split([on_device(source, b) for b in drawn], (RANDOM,))
    rows = token_windows(source, spec, text or "embedded", windows, asked.length)
    batches = for_decoder(source, token_batches(source, rows, asked.batch))
    return split(batches, () if text is not None else (EMBEDDED,))


def text_to_heal_on(
    source: Source, spec: Any, text: str | None, own: str | None, calibration: Calibration, steps: int, tokens: int = 0
) -> tuple[Batch, ...]:
    """Batches for healing: from the text `own`, or else from the calibration text without its held-out windows.

    They are enough for that many steps of at least so many tokens, unless the text is shorter.
    """
    first = calibration.measure[0].get("input_ids")
    own = None if own == text else own  # held-out windows of the same text are not trained on
    text = own or text
    if first is None or text is None or "decoder_input_ids" in calibration.measure[0]:
        if own is not None:
            raise DeadweightError("found a text to heal on for a model that is not calibrated on text; expected none")
        return calibration.measure
    length, device = first.shape[1], first.device
    size = len(first)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        size = max(size, HEALED * max(1, memory // PER) // length)
    held = [] if own is not None else [b["input_ids"].cpu() for b in (*calibration.measure, *calibration.judge)]
    skip = sum(len(ids) for ids in held)
    rows = token_windows(source, spec, text, skip + steps * max(size, tokens // length), length)[skip:]
    rows = torch.cat([*held[: len(calibration.measure)], rows])
    whole = rows[: len(rows) // size * size] if len(rows) >= size else rows
    return tuple({"input_ids": ids.to(device)} for ids in whole.split(size))


def cache_calibration(source: Source, spec: Any, asked: CalibrationRequest) -> Calibration:
    """Windows to measure a cache on: from a text, or from the built-in mixture; some are held out."""
    if asked.inputs is not None:
        given = given_inputs(asked.inputs)
        if "input_ids" not in given:
            raise DeadweightError(f"found calibration inputs {', '.join(given)}; expected input_ids, tokens of a text")
        expect_known(source, given)
        expect_tokens(source, given["input_ids"])
        given = {**given, "input_ids": given["input_ids"].long()}
        expect_masks(given)
        batches = batches_without_padding(source, given, asked.batch or MOST)
        for batch in batches:
            expect_positions(batch)
        return split(for_decoder(source, batches))
    if asked.text is None:
        rows = mixture_windows(source, spec, asked.windows, asked.length)
        return split(for_decoder(source, token_batches(source, rows, asked.batch)), (MIXTURE,))
    rows = token_windows(source, spec, asked.text, asked.windows, asked.length)
    return split(for_decoder(source, token_batches(source, rows, asked.batch)))


def for_decoder(source: Source, batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """The batches; behind an encoder, the decoder reads what the encoder does, unless they say otherwise."""
    if not getattr(source.config, "is_encoder_decoder", False):
        return tuple(batches)
    return tuple({"decoder_input_ids": b["input_ids"], **b} for b in batches)


def mixture_windows(source: Source, spec: Any, windows: int, length: int | None) -> Tensor:
    """Windows of all kinds of text of the mixture, interleaved, so that any part of them is a mixture too."""
    tokenizer, vocabulary = tokenizer_for(source, spec)
    size = window_length(source, length)
    kinds = []
    for name, text in mixture().items():
        ids = encode_text(text.encode(), tokenizer, vocabulary, source.name)
        wanted = max(1, round(SHARES[name] * windows))
        count = min(wanted, len(ids) // size)
        starts = [i * (len(ids) - size) // max(1, count - 1) for i in range(count)]
        places = [(i + 0.5) / max(count, 1) for i in range(count)]
        kinds += [(place, torch.tensor(ids[at : at + size])) for place, at in zip(places, starts, strict=True)]
    if len(kinds) < 2:
        raise DeadweightError(
            f"found windows of {size:,} tokens; the mixture of texts that comes with the package has no two of that "
            "length: give a text (--text), or shorter windows (--length)"
        )
    return torch.stack([ids for _, ids in sorted(kinds, key=lambda kind: kind[0])])


def judge_batches(source: Source, spec: Any, text: str, windows: int, length: int) -> tuple[Batch, ...]:
    """Windows of the text of --judge-text."""
    rows = token_windows(source, spec, text, windows, length)
    return for_decoder(source, token_batches(source, rows))


def token_batches(source: Source, rows: Tensor, batch: int | None = None) -> tuple[Batch, ...]:
    size = batch_size(len(rows), batch or min(MOST, max(1, AT_A_TIME // rows.shape[1])))
    return tuple({"input_ids": ids.to(device_of(source.module))} for ids in rows.split(size))


def split(batches: Sequence[Batch], notes: tuple[str, ...] = ()) -> Calibration:
    """Split off the last batches, to measure the loss on."""
    count = max(1, round(HELD_BACK * len(batches)))
    if len(batches) - count < 1:
        raise DeadweightError("found one batch of calibration inputs; expected two or more, because one is held out")
    cut = len(batches) - count
    tokens = sum(next(iter(b.values())).numel() for b in batches[:cut])
    return Calibration(tuple(batches[:cut]), tuple(batches[cut:]), tokens, notes)


def token_windows(source: Source, spec: Any, text: str, windows: int, length: int | None) -> Tensor:
    """The first windows of a text, (windows, length); for an encoder, with its special tokens at both ends."""
    read = read_text(text)
    check_text(read, text)
    tokenizer, vocabulary = tokenizer_for(source, spec)
    size = window_length(source, length)
    first, last = edges(source, tokenizer)
    inner = size - len(first) - len(last)
    ids = first_tokens(read, tokenizer, vocabulary, source.name, windows * inner)
    n_windows = len(ids) // inner
    if n_windows < 2:
        raise DeadweightError(
            f"{printable(text)} gives {len(ids):,} tokens; expected at least {2 * inner:,}, two windows of {size:,}: "
            "give more text, or shorter windows (--length)"
        )
    rows = torch.tensor(ids[: min(n_windows, windows) * inner]).view(-1, inner)
    around = [torch.tensor(e, dtype=torch.long).expand(len(rows), -1) for e in (first, last)]
    return torch.cat([around[0], rows, around[1]], 1)


def window_length(source: Source, length: int | None) -> int:
    """Tokens per window: as requested, or 1024, or the model's context if that is shorter."""
    longest = getattr(source.config, "max_position_embeddings", None) or 512
    size = length or min(LONGEST, longest)
    if size > longest or size < 2:
        raise DeadweightError(f"found windows of {size:,} tokens; {printable(source.name)} takes 2 to {longest:,}")
    return size


def tokenizer_for(source: Source, spec: Any) -> tuple[Any, int]:
    folder = local_folder(str(spec)) if isinstance(spec, (str, Path)) else None
    tokenizer = None if folder is None else tokenizer_of(str(folder), trust_remote_code=source.trusted)
    return tokenizer, int(getattr(source.config, "vocab_size", 0))


def edges(source: Source, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that an encoder's tokenizer puts before and after a text."""
    config = source.config
    if tokenizer is None or (hasattr(source.module, "generate") and not getattr(config, "is_encoder_decoder", False)):
        return [], []
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return ([first] if first is not None else []), ([last] if last is not None else [])


def given_inputs(inputs: Any) -> Mapping[str, Tensor]:
    """Tensors by argument name, one row per sample: a mapping, or a safetensors file."""
    if isinstance(inputs, (str, Path)):
        try:
            inputs = load_file(str(inputs))
        except Exception as error:  # a stranger's file
            raise DeadweightError(f"{printable(inputs)} is no safetensors file of inputs ({reason(error)})") from error
    sizes = {name: t.shape[0] if t.ndim else 0 for name, t in inputs.items()}
    if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise DeadweightError(f"found calibration inputs with {sizes or 'nothing'} rows; expected as many for each")
    return dict(inputs)


def expect_tokens(source: Source, ids: Tensor) -> None:
    """Raise unless these are tokens of the model's vocabulary, (rows, tokens)."""
    words = vocabulary_of(source)
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim != 2 or not ids.numel():
        raise DeadweightError(
            f"found input_ids of shape {tuple(ids.shape)} and type {ids.dtype}; expected whole numbers, (rows, tokens)"
        )
    least, most = int(ids.min()), int(ids.max())
    if words and not 0 <= least <= most < words:
        raise DeadweightError(
            f"found input_ids from {least} to {most}; expected tokens from 0 to {words - 1}, the vocabulary of "
            f"{printable(source.name)}"
        )


def vocabulary_of(source: Source) -> int:
    """How many tokens the model knows; 0 if it does not say."""
    model: Any = source.module
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # a model of text and pictures may have no table of its own
        table = None
    return int(getattr(source.config, "vocab_size", 0) or 0) if table is None else len(table)


def expect_known(source: Source, inputs: Mapping[str, Tensor]) -> None:
    """Raise for inputs that the model does not take, and for windows longer than its context."""
    known = signature(source.module.forward).parameters
    if strange := [name for name in inputs if name not in known or name == "labels"]:
        raise DeadweightError(
            f"found calibration inputs {', '.join(map(printable, strange))}; expected input_ids, and what else "
            f"{printable(source.name)} takes but labels"
        )
    longest, size = getattr(source.config, "max_position_embeddings", None), inputs["input_ids"].shape[-1]
    if longest and size > longest:
        raise DeadweightError(f"found windows of {size:,} tokens; {printable(source.name)} takes 2 to {longest:,}")


def expect_positions(inputs: Mapping[str, Tensor]) -> None:
    """Raise unless the tokens of every row start at position 0: keys are measured before RoPE, by their place."""
    positions = inputs.get("position_ids")
    if positions is not None and not torch.equal(positions, torch.arange(positions.shape[-1]).expand_as(positions)):
        raise DeadweightError("found position_ids other than 0, 1, …; expected calibration inputs without them")


def batches_without_padding(source: Source, inputs: Mapping[str, Tensor], batch: int) -> list[Batch]:
    """Batches of rows that are equally long, mixed so that any part of them has rows of all lengths."""
    placed = []
    for rows in rows_of_one_length(inputs):
        own = as_batches(source, rows, batch)
        placed += [((n + 0.5) / len(own), one) for n, one in enumerate(own)]
    return [one for _, one in sorted(placed, key=lambda place: place[0])]


def as_batches(source: Source, inputs: Mapping[str, Tensor], batch: int) -> list[Batch]:
    rows = next(iter(inputs.values())).shape[0]
    size = batch_size(rows, batch)
    return [on_device(source, {n: t[i : i + size] for n, t in inputs.items()}) for i in range(0, rows, size)]


def batch_size(rows: int, batch: int) -> int:
    """The batch size: as requested, but so that there are at least two batches."""
    return min(batch, max(1, rows // 2))


def on_device(source: Source, batch: Mapping[str, Any]) -> Batch:
    device, precision = device_of(source.module), float_of(source.module)
    return {
        n: t.to(device, precision if t.is_floating_point() else None) if isinstance(t, Tensor) else t
        for n, t in batch.items()
    }
