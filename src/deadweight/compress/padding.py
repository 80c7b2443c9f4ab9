"""Calibration inputs without their padding: padding is neither measured nor judged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deadweight.errors import DeadweightError

SIDES = ("", "decoder_")  # how names of a model's inputs begin, and those of a decoder behind an encoder
Rows = dict[str, Tensor]


def expect_masks(inputs: Mapping[str, Tensor]) -> None:
    """Raise unless attention masks have one number for each token."""
    for side in SIDES:
        name, ids = f"{side}attention_mask", inputs.get(f"{side}input_ids")
        if name in inputs and ids is not None and inputs[name].shape != ids.shape:
            raise DeadweightError(
                f"found an {name} of shape {tuple(inputs[name].shape)}; expected that of {side}input_ids, "
                f"{tuple(ids.shape)}"
            )


def rows_of_one_length(inputs: Mapping[str, Tensor]) -> list[Rows]:
    """The inputs without their padding and its masks, as groups of rows that are equally long.

    Groups are in the order of their first rows. Without masks there is one group. A mask that is not one of tokens
    stays as it is.
    """
    ranges = {side: token_ranges(inputs, side) for side in SIDES if is_of_tokens(inputs, side)}
    kept = {name: x for name, x in inputs.items() if name not in {f"{side}attention_mask" for side in ranges}}
    if not ranges:
        return [kept]
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(next(iter(inputs.values())))):
        groups.setdefault(tuple(len(tokens[row]) for tokens in ranges.values()), []).append(row)

    def cut(name: str, x: Tensor, rows: list[int]) -> Tensor:
        side = "decoder_" if name.startswith("decoder_") else ""
        if side not in ranges or x.shape[:2] != inputs[f"{side}input_ids"].shape:
            return x[rows]
        spans = ranges[side]
        return torch.stack([x[row, spans[row].start : spans[row].stop] for row in rows])

    return [{name: cut(name, x, rows) for name, x in kept.items()} for rows in groups.values()]


def is_of_tokens(inputs: Mapping[str, Tensor], side: str) -> bool:
    mask, ids = inputs.get(f"{side}attention_mask"), inputs.get(f"{side}input_ids")
    return mask is not None and ids is not None and mask.ndim == 2 and mask.shape == ids.shape


def token_ranges(inputs: Mapping[str, Tensor], side: str) -> list[range]:
    """Where the tokens of every row are; raises unless they stand side by side."""
    seen = inputs[f"{side}attention_mask"] != 0
    starts = (seen[:, 1:] & ~seen[:, :-1]).sum(1) + seen[:, 0].long()  # of runs of tokens
    for row, count in enumerate(starts.tolist()):
        if count != 1:
            raise DeadweightError(
                f"found {'padding between the tokens' if count else 'no tokens'} of row {row} of the calibration "
                f"inputs ({side}attention_mask); expected tokens side by side, with padding before or after them, or "
                "none"
            )
    first, length = seen.long().argmax(1).tolist(), seen.sum(1).tolist()
    return [range(a, a + n) for a, n in zip(first, length, strict=True)]
