"""Numbers of one to eight bits: how a coordinate of unit variance is rounded, and how codes lie in bytes.

A coordinate with b bits is rounded to one of 2ᵇ levels. The levels are an odd polynomial of the code: close to the best
levels of a normal variable (Lloyd and Max), and computed without a table.

The codes of one token are a row of bytes. Coordinates are ordered by their width, and there are multiples of eight of
each, so that eight coordinates of width b take b bytes. A width is a sum of powers of two: five bits are four and one.
So a row holds all parts of eight bits, then all parts of four, of two and of one. A part of p bits holds 8 / p codes in
a byte, the first ones in the lowest bits of all its bytes: unpacking it is a shift and a mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .format import WIDTHS
from .scratch import SCRATCH

PARTS = (8, 4, 2, 1)  # bits that are stored together

# Level of code c with b bits, for a normal variable of unit variance: u·(p₁ + p₂u² + p₃u⁴), u = (2c − 2ᵇ + 1) / 2ᵇ.
# These minimise the mean squared error within this family; LEVEL_ERRORS holds that error for widths 0 to 8.
LEVELS: dict[int, tuple[float, float, float]] = {
    1: (1.595769, 0.0, 0.0),
    2: (1.785808, 0.405520, 0.0),
    3: (1.962920, 0.306184, 0.447157),
    4: (2.102202, 0.065491, 0.969375),
    5: (2.214425, -0.236246, 1.512232),
    6: (2.525308, -0.517459, 1.871913),
    7: (3.224445, -0.688476, 1.849471),
    8: (3.950000, 0.0, 0.0),
}
LEVEL_ERRORS = (1.0, 0.363380, 0.117482, 0.034548, 0.009517, 0.002534, 0.000679, 0.000220, 0.000088)


def levels(width: int) -> Tensor:
    """The 2ᵇ values that a coordinate with b bits can take, in rising order."""
    first, second, third = LEVELS[width]
    u = torch.arange(2**width, dtype=torch.float64, device="cpu") * (2 / 2**width) - (1 - 1 / 2**width)
    return u * (first + u.square() * (second + u.square() * third))


def middles(width: int) -> Tensor:
    """The middles between neighbouring levels."""
    steps = levels(width)
    return (steps[1:] + steps[:-1]) / 2


@cache
def reach(width: int) -> float:
    """The largest value that is not clipped: the outermost level, and half the step before it."""
    if width == 1:  # one bit says on which side; how far out never matters
        return float("inf")
    first, second, third = LEVELS[width]  # in plain numbers: torch.compile reads no number from a tensor
    below, last = (u * (first + u**2 * (second + u**2 * third)) for u in (1 - 3 / 2**width, 1 - 1 / 2**width))
    return last + (last - below) / 2


@dataclass(frozen=True)
class Row:
    """How the codes of one token lie in bytes: `runs` says how many coordinates have each of `WIDTHS` bits.

    Coordinates are taken as (…, kept, tokens): what is done to one coordinate is done to a long stretch of memory.
    """

    runs: tuple[int, ...]
    widths: Tensor  # of every coordinate

    @property
    def kept(self) -> int:
        return sum(self.runs)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(width * n for width, n in zip(WIDTHS, self.runs, strict=True)) // 8

    def members(self, part: int) -> list[tuple[int, int, int]]:
        """The runs that have a part of so many bits: where they start and stop, and their width."""
        spans, start = [], 0
        for width, n in zip(WIDTHS, self.runs, strict=True):
            if width & part and n:
                spans.append((start, start + n, width))
            start += n
        return spans

    def encode(self, z: Tensor) -> Tensor:
        """The code of the nearest level of every coordinate, (…, kept, t), as uint8."""
        middles = constants(self.runs, z.dtype, z.device).middles
        lines = z.movedim(-2, 0).flatten(1).contiguous()  # (kept, tokens of the whole batch)
        codes = torch.searchsorted(middles, lines, out_int32=True).to(torch.uint8)
        return codes.view(len(lines), *z.shape[:-2], z.shape[-1]).movedim(0, -2)

    def values(self, codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The levels of codes, (…, kept, t)."""
        own, shape = constants(self.runs, dtype, codes.device), tuple(codes.shape)
        u = (torch.empty(shape, dtype=dtype, device=codes.device) if out is None else out).copy_(codes)
        u.mul_(own.step).add_(own.offset)
        square = torch.mul(u, u, out=SCRATCH.take("square", shape, u, dtype))
        level = torch.mul(square, own.third, out=SCRATCH.take("level", shape, u, dtype))
        return u.mul_(level.add_(own.second).mul_(square).add_(own.first))

    def pack(self, codes: Tensor) -> Tensor:
        """(…, kept, t) codes as (…, t, size) bytes."""
        rows = []
        for part in PARTS:
            spans = self.members(part)
            bits = [(codes[..., a:b, :] >> (width & (part - 1))) & ((1 << part) - 1) for a, b, width in spans]
            if not bits:
                continue
            pieces = torch.cat(bits, -2).unflatten(-2, (8 // part, -1)).unbind(-3)
            packed = pieces[0]
            for i, piece in enumerate(pieces[1:], 1):
                packed = packed | (piece << (i * part))
            rows.append(packed)
        return (torch.cat(rows, -2) if rows else codes).transpose(-1, -2)

    def unpack(self, rows: Tensor) -> Tensor:
        """(…, t, size) bytes as (…, kept, t) codes."""
        *batch, tokens, size = rows.shape
        columns = SCRATCH.take("columns", (*batch, size, tokens), rows, torch.uint8).copy_(rows.transpose(-1, -2))
        codes = SCRATCH.take("codes", (*batch, self.kept, tokens), rows, torch.uint8)
        start = 0
        for part in PARTS:
            spans = self.members(part)
            n = sum(b - a for a, b, _ in spans) * part // 8
            packed, start, at = columns[..., start : start + n, :], start + n, 0
            for a, b, width in spans:
                piece = some_codes(packed, at, at + b - a, part)
                piece = piece << (width & (part - 1)) if width & (part - 1) else piece
                if width < 2 * part:  # the highest part of a code is written first
                    codes[..., a:b, :] = piece
                else:
                    codes[..., a:b, :] |= piece
                at += b - a
        return codes


def some_codes(packed: Tensor, first: int, last: int, part: int) -> Tensor:
    """Codes first to last of a part, (…, codes, t): n bytes hold n codes in their lowest bits, n more above them …"""
    n = packed.shape[-2]
    pieces = []
    for level in range(8 // part):
        a, b = max(first - level * n, 0), min(last - level * n, n)
        if a < b:
            shifted = packed[..., a:b, :] >> (level * part) if level else packed[..., a:b, :]
            top = level == 8 // part - 1  # nothing lies above it
            pieces.append(shifted if top else shifted & ((1 << part) - 1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)


@dataclass(frozen=True)
class Constants:
    """What makes levels of the codes of a row, and codes of numbers: a column for each, and middles between levels."""

    step: Tensor
    offset: Tensor
    first: Tensor
    second: Tensor
    third: Tensor
    middles: Tensor  # (kept, most), filled up with infinity
    reach: Tensor  # (kept, 1)


@cache
@torch.inference_mode(False)  # the next call may need gradients
def constants(runs: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constants:
    each = [width for width, n in zip(WIDTHS, runs, strict=True) for _ in range(n)]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device="cpu")[:, None].to(device, dtype)

    most = 2 ** max(each, default=1) - 1
    lines = {width: F.pad(middles(width), (0, most - 2**width + 1), value=math.inf) for width in set(each)}
    table = torch.stack([lines[width] for width in each]) if each else torch.zeros(0, most)
    return Constants(
        column([2 / 2**width for width in each]),
        column([1 / 2**width - 1 for width in each]),
        column([LEVELS[width][0] for width in each]),
        column([LEVELS[width][1] for width in each]),
        column([LEVELS[width][2] for width in each]),
        table.to(device, dtype),
        column([reach(width) for width in each]),
    )


@cache
def row(runs: tuple[int, ...]) -> Row:
    """The row of coordinates of which so many have each of `WIDTHS` bits."""
    each = [width for width, n in zip(WIDTHS, runs, strict=True) for _ in range(n)]
    return Row(runs, torch.tensor(each, dtype=torch.long, device="cpu"))  # also while a model is built without memory
