"""For which sizes the kernels of a coded cache are compiled, and the shared memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .format import CacheSpec

STAGES = 2  # groups of tokens on their way to each warp
AT_ONCE = 8  # warps of `decode` on a multiprocessor: they share its registers
JOIN_THREADS = 256
ENCODE_THREADS = 256
PLAIN_ROOM = 48 << 10  # bytes of shared memory that a program gets without asking
ROOM = 113 << 10  # bytes of shared memory with which two programs fit on a multiprocessor
MOST_QUERIES = 4  # that a warp serves
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class Turning:
    """How the rotary pairs of an attention are divided, and which fragments of codes make keys of either kind.

    A fragment is one field of 16 units. The sets are the bits of a number.
    """

    fast_groups: int  # of 16 pairs
    half_chunk: int  # tokens
    fast_fragments: int
    slow_fragments: int


@dataclass(frozen=True)
class Sizes:
    """What the kernels are compiled for."""

    d_qk: int
    d_v: int
    units: int
    key_fields: int
    value_fields: int
    queries: int  # of a key head
    set_heads: int  # key heads that are coded together
    turning: Turning
    masked: bool
    kind: int  # of floating-point numbers

    @property
    def pairs(self) -> int:
        """Half of the dimensions of a key head, filled up to a multiple of 16."""
        return -(-self.d_qk // 32) * 16

    @property
    def blocks(self) -> int:
        """Groups of 16 units."""
        return -(-self.units // 16)

    @property
    def fragments(self) -> int:
        return self.blocks * (self.key_fields + self.value_fields)

    @property
    def slots(self) -> int:
        return self.fragments * 16

    @property
    def programs(self) -> int:
        """Programs of `decode` at once on a multiprocessor."""
        return 2 if self.bytes_with(self.tiles, AT_ONCE // 2) <= ROOM else 1

    @property
    def warps(self) -> int:
        """Of a program of `decode`."""
        return AT_ONCE // self.programs

    @property
    def small(self) -> bool:
        """Whether registers suffice for what every tile of tokens reads again: masks, and what keys start from."""
        return self.pairs <= 32 and self.fragments <= 8

    @property
    def keeps_maps(self) -> bool:
        """Whether they suffice for the maps to fast pairs too."""
        return self.small and self.turning.fast_fragments.bit_count() * self.turning.fast_groups <= 4

    @property
    def tiles(self) -> int:
        """Tiles of 16 tokens at once."""
        return 1 if self.fragments > 16 or self.turning.half_chunk < 64 else 2

    @property
    def span(self) -> int:
        """Chunks for which the query is turned once."""
        return 2 if self.small else 1

    @property
    def chunk(self) -> int:
        """Tokens of these chunks."""
        return 2 * self.turning.half_chunk * self.span

    @property
    def turns(self) -> int:
        """Programs among which the queries of a key head are divided."""
        return -(-self.queries // MOST_QUERIES)

    @property
    def at_once(self) -> int:
        """Queries of a program."""
        return -(-self.queries // self.turns)

    def defines(self) -> dict[str, str]:
        turning = self.turning
        numbers = {
            "D": self.d_qk,
            "DV": self.d_v,
            "D2": self.pairs,
            "NU": self.units,
            "FK": self.key_fields,
            "FV": self.value_fields,
            "G": self.queries,
            "GQ": self.at_once,
            "TURNS": self.turns,
            "WARPS": self.warps,
            "STAGES": STAGES,
            "MASKED": int(self.masked),
            "KIND": self.kind,
            "MT": self.tiles,
            "KEEP": int(self.small),
            "KEEP_MAPS": int(self.keeps_maps),
            "SPAN": self.span,
            "BLOCKS": self.programs,
            "KF": turning.fast_groups,
            "SUB": turning.half_chunk,
            "N_FAST": turning.fast_fragments.bit_count(),
            "N_SLOW": turning.slow_fragments.bit_count(),
            "SHARED_BYTES": self.shared_bytes(),
            "ENCODE_ROWS": self.encode_rows,
            "ROW_NUMBERS": self.row_numbers,
        }
        sets = {"FAST_FRAGMENTS": turning.fast_fragments, "SLOW_FRAGMENTS": turning.slow_fragments}
        return {name: str(n) for name, n in numbers.items()} | {name: f"{n}ULL" for name, n in sets.items()}

    def shared_bytes(self) -> int:
        """Shared memory of a program of `decode`: `struct Shared`, or what its warps add up at the end."""
        return self.bytes_with(self.tiles, self.warps)

    def bytes_with(self, tiles: int, warps: int) -> int:
        """The same, with so many tiles at once and so many warps."""
        row = 2 * self.units
        row += 0 if row // 16 % 2 else 16
        groups, chunk, turning = self.pairs // 16, 2 * self.turning.half_chunk, self.turning
        table = self.chunk // (16 * tiles) * groups * 2 * 32 * 16
        fast = turning.fast_fragments.bit_count() * 2 * turning.fast_groups * 32 + 1
        slow = turning.slow_fragments.bit_count() * 2 * (groups - turning.fast_groups) * 32 + 1
        masks = self.blocks * self.key_fields * 4 * 8 + self.fragments * 8 * 8
        starts = 8 * (16 * turning.fast_groups + 1)
        tables = table + 16 * (fast + slow) + groups * 16 * 16 + 256 * 8 + masks + starts
        ring = STAGES * (16 * tiles * row + 32)
        warp = groups * 4 * 32 * 16 + chunk * 8 + 16 + ring
        warp = -(-warp // 16) * 16
        gathered = warps * 4 * (16 + 4 * self.slots)
        return max(-(-tables // 16) * 16 + warps * warp, gathered)

    @property
    def row_numbers(self) -> int:
        """Numbers of a row in `encode`: keys, values, and coordinates of all slots."""
        return self.set_heads * (self.d_qk + self.d_v) + self.units * (self.key_fields + self.value_fields)

    @property
    def encode_rows(self) -> int:
        """Rows of a program of `encode`, for which it reads the maps once."""
        fixed = 4 * 4 * ENCODE_THREADS + 5 * self.units * (self.key_fields + self.value_fields)
        return 4 if 4 * 4 * self.row_numbers + fixed <= PLAIN_ROOM - 1024 else 1

    def encode_bytes(self) -> int:
        """Shared memory of a program of `encode`, besides what it declares."""
        return 4 * self.encode_rows * self.row_numbers

    def join_bytes(self, first: int) -> int:
        """Shared memory of a program of `join`."""
        return 4 * self.at_once * (self.slots + first + 1 + JOIN_THREADS)


def sizes_of(spec: CacheSpec, turning: Turning, masked: bool, dtype: torch.dtype) -> Sizes:
    queries = spec.heads // spec.key_heads
    fields = (spec.n_units, spec.key_fields, spec.value_fields)
    heads = spec.key_heads // spec.n_sets
    return Sizes(spec.d_qk, spec.d_v, *fields, queries, heads, turning, masked, KINDS[dtype])


def largest_sizes(spec: CacheSpec, dtype: torch.dtype) -> Sizes:
    """Sizes that take at least as much shared memory as those of any coder of this kind."""
    fragments = (1 << -(-spec.n_units // 16) * spec.key_fields) - 1
    groups = -(-spec.d_qk // 32)
    some = Turning(0, 64, fragments, fragments)
    return max(
        (sizes_of(spec, replace(some, fast_groups=n), True, dtype) for n in range(groups + 1)),
        key=Sizes.shared_bytes,
    )
