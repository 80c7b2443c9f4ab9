"""Numbers of one to eight bits: how a coordinate of unit variance is rounded, and how codes lie in bytes.

A coordinate with b bits is rounded to one of 2ᵇ levels. The levels are an odd polynomial of the code: close to the best
levels of a normal variable (Lloyd and Max), and computed without a table.

The codes of one token are a row of bytes. Coordinates are ordered by their width, and there are multiples of eight of
each, so that eight coordinates of width b take b bytes. A width is a sum of powers of two: five bits are four and one.
So a row holds all parts of eight bits, then all parts of four, of two and of one. A part of p bits holds 8 / p codes in
a byte, the first ones in the lowest bits of all its bytes: unpacking it is a shift and a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTHS = (8, 7, 6, 5, 4, 3, 2, 1)  # the order of runs in a row
PARTS = (8, 4, 2, 1)  # bits that are stored together
GROUP = 8  # coordinates: the counts of runs are multiples of this

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


@cache
def boundaries(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The middles between neighbouring levels."""
    steps = levels(width)
    return ((steps[1:] + steps[:-1]) / 2).to(device, dtype)


@cache
def reach(width: int) -> float:
    """The largest value that is not clipped: the outermost level, and half the step before it."""
    if width == 1:  # one bit says on which side; how far out never matters
        return float("inf")
    last = levels(width)[-2:].tolist()
    return float(last[1] + (last[1] - last[0]) / 2)


@dataclass(frozen=True)
class Row:
    """How the codes of one token lie in bytes: `runs` says how many coordinates have 8, 7, … 1 bits.

    The tensors hold a number for each coordinate: how far out it reaches, and what makes its value of its code.
    """

    runs: tuple[int, ...]
    widths: Tensor
    reach: Tensor
    step: Tensor
    shift: Tensor
    polynomial: Tensor  # (3, kept)

    @property
    def kept(self) -> int:
        return sum(self.runs)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(width * n for width, n in zip(WIDTHS, self.runs, strict=True)) // 8

    def members(self, part: int) -> list[tuple[int, int, int]]:
        """The runs that have a part of so many bits: where they start and stop, and the bits below that part."""
        spans, start = [], 0
        for width, n in zip(WIDTHS, self.runs, strict=True):
            if width & part and n:
                spans.append((start, start + n, width & (part - 1)))
            start += n
        return spans

    def encode(self, z: Tensor) -> Tensor:
        """The code of the nearest level of every coordinate, (…, kept), as uint8."""
        pieces = z.split([n for n in self.runs if n], -1)
        widths = [width for width, n in zip(WIDTHS, self.runs, strict=True) if n]
        codes = [
            torch.bucketize(piece.contiguous(), boundaries(width, z.dtype, z.device), out_int32=True).to(torch.uint8)
            for width, piece in zip(widths, pieces, strict=True)
        ]
        return torch.cat(codes, -1) if codes else z.to(torch.uint8)

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The levels of codes, (…, kept)."""
        step, shift, polynomial = (x.to(codes.device, dtype) for x in (self.step, self.shift, self.polynomial))
        u = codes.to(dtype).mul_(step).sub_(shift)
        square = u * u
        return square.mul(polynomial[2]).add_(polynomial[1]).mul_(square).add_(polynomial[0]).mul_(u)

    def pack(self, codes: Tensor) -> Tensor:
        """(…, kept) codes as (…, size) bytes."""
        rows = []
        for part in PARTS:
            bits = [(codes[..., a:b] >> low) & ((1 << part) - 1) for a, b, low in self.members(part)]
            if not bits:
                continue
            pieces = torch.cat(bits, -1).unflatten(-1, (8 // part, -1)).unbind(-2)
            packed = pieces[0]
            for i, piece in enumerate(pieces[1:], 1):
                packed = packed | (piece << (i * part))
            rows.append(packed)
        return torch.cat(rows, -1) if rows else codes

    def unpack(self, rows: Tensor) -> Tensor:
        """(…, size) bytes as (…, kept) codes."""
        codes = rows.new_zeros(*rows.shape[:-1], self.kept)
        start = 0
        for part in PARTS:
            spans = self.members(part)
            n = sum(b - a for a, b, _ in spans) * part // 8
            if not n:
                continue
            packed = rows[..., start : start + n]
            start += n
            bits = (
                torch.cat([(packed >> at) & ((1 << part) - 1) for at in range(0, 8, part)], -1) if part < 8 else packed
            )
            at = 0
            for a, b, low in spans:
                piece = bits[..., at : at + b - a]
                codes[..., a:b] |= piece << low if low else piece
                at += b - a
        return codes


@cache
def row(runs: tuple[int, ...]) -> Row:
    """The row of coordinates of which so many have 8, 7, … 1 bits."""
    each = [width for width, n in zip(WIDTHS, runs, strict=True) for _ in range(n)]

    def numbers(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")  # also while a model is built without memory

    counts = numbers([2.0**width for width in each])
    polynomial = numbers([LEVELS[width] for width in each]).reshape(-1, 3).T.contiguous()
    reaches = numbers([reach(width) for width in each], torch.float32)
    return Row(runs, numbers(each, torch.long), reaches, 2 / counts, 1 - 1 / counts, polynomial)
