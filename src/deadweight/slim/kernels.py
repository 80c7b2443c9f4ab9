"""Decoding from a coded cache on an NVIDIA GPU: three kernels, compiled for the sizes of an attention when it first
runs.

- `encode` makes the row of one new token, in one launch.
- `decode` reads rows once for up to four query heads of a key head. Every warp takes a chunk of 128 or 64 tokens
  at a time. It makes float16 numbers of codes by masks, scores of these numbers on tensor cores, and gathers the
  *numbers* of codes by the softmax, in float32: values are made once, at the end.
- `join` adds up what all programs have gathered, makes values of it, and adds the tokens that are not coded.

Rotary positions are split: the query is turned to the start of the chunk, in float32, and what is left is the place of
a token in the chunk.

- *Fast pairs*: keys are made of the numbers by a map, and turned by their place, for which one table of float16 serves
  all.
- *Slow pairs* turn by less than 0.06 within a quarter of a chunk. There the map is applied to the query instead, once
  for half a chunk, and the rotation is replaced by c + k · place, the best such line: its error is that of float16.
- *The mean of the keys* may be large. What it adds to a score is a product of the query with that table, which has
  cos − 1 in place of cos: then only what changes within a chunk is rounded.

Only CUDA's own compiler is needed, which comes with torch. Elsewhere, and for what the kernels do not know (a soft cap,
more than one new token, heads of more than 128 dimensions, gradients), `coded_attention.py` has the same in torch
operations.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionOptions
from .coder import CODERS, Coder
from .cuda_source import SOURCE
from .format import CacheSpec

STAGES = 2  # groups of tokens on their way to each warp
MOST_DIMENSIONS = 128  # of a head
MOST_FRAGMENTS = 64  # of the codes of keys
PER_PROCESSOR = 2  # programs of `decode` at once on a multiprocessor
JOIN_THREADS = 256
START = 2  # chunks of tokens in whose time a program of `decode` starts and ends
MOST_QUERIES = 4  # that a warp serves
SLOW = 0.06  # the largest angle by which a slow pair turns between the middle and the end of half a chunk
LOG2E = 1.4426950408889634
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NAMESPACE = f"deadweight_{zlib.crc32(__name__.encode()):x}"  # a checkpoint brings a copy of this file along


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
    def small(self) -> bool:
        """Whether registers suffice for two tiles of 16 tokens at once."""
        return self.pairs <= 32 and self.fragments <= 8

    @property
    def warps(self) -> int:
        """Of a program of `decode`."""
        return 6 if self.small else 4

    @property
    def tiles(self) -> int:
        """Tiles of 16 tokens at once."""
        return 2 if self.small else 1

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
            "SPAN": self.span,
            "BLOCKS": PER_PROCESSOR,
            "KF": turning.fast_groups,
            "SUB": turning.half_chunk,
            "N_FAST": turning.fast_fragments.bit_count(),
            "N_SLOW": turning.slow_fragments.bit_count(),
            "SHARED_BYTES": self.shared_bytes(),
        }
        sets = {"FAST_FRAGMENTS": turning.fast_fragments, "SLOW_FRAGMENTS": turning.slow_fragments}
        return {name: str(n) for name, n in numbers.items()} | {name: f"{n}ULL" for name, n in sets.items()}

    def shared_bytes(self) -> int:
        """Shared memory of a program of `decode`: `struct Shared`, or what its warps add up at the end."""
        row = 2 * self.units
        row += 0 if row // 16 % 2 else 16
        groups, chunk, turning = self.pairs // 16, 2 * self.turning.half_chunk, self.turning
        table = self.chunk // (16 * self.tiles) * groups * 2 * 32 * 16
        fast = turning.fast_fragments.bit_count() * 2 * turning.fast_groups * 32 + 1
        slow = turning.slow_fragments.bit_count() * 2 * (groups - turning.fast_groups) * 32 + 1
        masks = self.blocks * self.key_fields * 4 * 8 + self.fragments * 8 * 8
        tables = table + 16 * (fast + slow) + 4 * groups * 4 * 16 + groups * 16 * 16 + 256 * 8 + masks
        ring = STAGES * (16 * self.tiles * row + 32)
        warp = groups * 4 * 32 * 16 + chunk * 8 + 16 + ring
        warp = -(-warp // 16) * 16
        gathered = self.warps * 4 * (16 + 4 * self.slots)
        return max(-(-tables // 16) * 16 + self.warps * warp, gathered)

    def join_bytes(self, first: int) -> int:
        """Shared memory of a program of `join`."""
        return 4 * self.at_once * (self.slots + first + 1 + JOIN_THREADS)


@dataclass(frozen=True)
class Kernels:
    encode: Any
    decode: Any
    join: Any


@lru_cache(maxsize=256)
def compiled(sizes: Sizes, device: int) -> Kernels:
    """The kernels for these sizes, on the current device; compiling takes a second or two."""
    source = "".join(f"#define {name} {value}\n" for name, value in sizes.defines().items()) + SOURCE
    compile_kernel = torch.cuda._compile_kernel
    kernels = Kernels(
        *(compile_kernel(source, name, nvcc_options=["--std=c++17"]) for name in ("encode", "decode", "join"))
    )
    if sizes.shared_bytes() >= 48 << 10:
        kernels.decode.set_shared_memory_config(sizes.shared_bytes())
    return kernels


@dataclass(frozen=True)
class Prepared:
    """The maps of a coder as the kernels read them."""

    order: Tensor  # dimensions of a key head: first ones of rotary pairs, second ones, the others
    places: Tensor  # dimensions of a query in the order of the kernel; −1 is none
    rates: Tensor
    key_mean: Tensor
    scaled_mean: Tensor
    value_mean: Tensor
    gains: Tensor
    key_masks: Tensor
    all_masks: Tensor
    fast_maps: Tensor
    slow_maps: Tensor
    slow_terms: Tensor
    steps: Tensor
    starts: Tensor
    table: Tensor
    offsets: Tensor
    values_of: Tensor
    key_encode: Tensor
    predict: Tensor
    value_encode: Tensor
    levels: Tensor
    bits: Tensor
    turning: Turning


def sizes_of(spec: CacheSpec, turning: Turning, masked: bool, dtype: torch.dtype) -> Sizes:
    queries = spec.heads // spec.key_heads
    fields = (spec.n_units, spec.key_fields, spec.value_fields)
    return Sizes(spec.d_qk, spec.d_v, *fields, queries, turning, masked, KINDS[dtype])


def largest_sizes(spec: CacheSpec, dtype: torch.dtype) -> Sizes:
    """Sizes that take at least as much shared memory as those of any coder of this kind."""
    fragments = (1 << -(-spec.n_units // 16) * spec.key_fields) - 1
    groups = -(-spec.d_qk // 32)
    some = Turning(0, 64, fragments, fragments)
    return max(
        (sizes_of(spec, replace(some, fast_groups=n), True, dtype) for n in range(groups + 1)),
        key=Sizes.shared_bytes,
    )


def fitting(coder: Coder, states: Tensor) -> bool:
    """Whether the kernels know this attention, on this device."""
    spec = coder.spec
    if states.device.type != "cuda" or torch.version.cuda is None or states.dtype not in KINDS:
        return False
    if spec.n_units % 8 or max(spec.d_qk, spec.d_v) > MOST_DIMENSIONS or torch.is_grad_enabled() or not coder.rounds:
        return False
    if -(-spec.n_units // 16) * spec.key_fields > MOST_FRAGMENTS:
        return False
    return largest_sizes(spec, states.dtype).shared_bytes() <= shared_room(states.device.index or 0)


@torch.compiler.assume_constant_result
def shared_room(device: int) -> int:
    """Bytes of shared memory that a program may have; 0 where the kernels cannot be compiled."""
    if not hasattr(torch.cuda, "_compile_kernel") or torch.cuda.get_device_capability(device) < (8, 0):
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)) - 1024


def decodes(coder: Coder, query: Tensor, options: AttentionOptions) -> bool:
    """Whether `decode` knows this call."""
    mask = options.mask
    plain = mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    return query.shape[2] == 1 and options.softcap is None and not options.dropout and plain and fitting(coder, query)


def prepared(coder: Coder) -> Prepared:
    """Made once, and again when a map has changed."""
    state = tuple((b.data_ptr(), b._version, b.device) for b in coder.buffers())
    known = coder.__dict__.get("_prepared")
    if known is None or known[0] != state:
        known = coder.__dict__["_prepared"] = (state, prepare(coder))
    return known[1]


@torch.no_grad()
def prepare(coder: Coder) -> Prepared:
    spec, units = coder.spec, coder.layout.units
    device = coder.key_mean.device
    blocks, half = -(-spec.n_units // 16), -(-spec.d_qk // 32) * 16
    heads, width = spec.key_heads // spec.n_sets, 16 * blocks
    order = coder.order.cpu() if spec.pairs else torch.arange(spec.d_qk)
    places, rates = by_speed(kernel_places(spec.pairs, spec.d_qk, half), coder, half)

    def by_unit(tensor: Tensor) -> Tensor:
        """(sets, fields, units, …) as (sets, padded units, fields, …)."""
        pad = torch.zeros(*tensor.shape[:2], width - spec.n_units, *tensor.shape[3:], dtype=tensor.dtype)
        return torch.cat([tensor, pad], 2).transpose(1, 2)

    masks, shrink = by_unit(units.masks), by_unit(torch.exp2(-units.shifts.double()) * (units.widths > 0))

    def folded(decode: Tensor, fields: slice) -> Tensor:
        """Maps of numbers of units, (key heads, padded units, fields, dimensions)."""
        maps = by_unit(decode.cpu().double().unflatten(1, (-1, spec.n_units))) * shrink[:, :, fields, None]
        return maps.unflatten(3, (heads, -1)).movedim(3, 1).flatten(0, 1)

    keys = folded(coder.key_decode, slice(0, spec.key_fields))[..., places.clamp(min=0)] * (places >= 0)
    gains = torch.exp2(keys.abs().flatten(1).amax(1).clamp(min=1e-30).log2().ceil())
    keys = (keys / gains[:, None, None, None]).half()
    key_masks = masks[:, :, : spec.key_fields].repeat_interleave(heads, 0).double()
    starts = -((1024 + key_masks / 2)[..., None] * keys.double()).sum((1, 2))  # key heads, 2 · half
    mean = coder.key_mean.cpu().double().view(spec.key_heads, -1)
    scaled = mean[:, places.clamp(min=0)] * (places >= 0) / gains[:, None]
    values = folded(coder.predict, slice(0, spec.key_fields))
    if spec.value_fields:
        values = torch.cat([values, folded(coder.value_decode, slice(spec.key_fields, None))], 2)
    by_block = masks.unflatten(1, (-1, 16)).transpose(2, 3)  # sets blocks fields 16
    turning = turning_of(keys, rates)
    sizes = sizes_of(spec, turning, False, torch.float32)
    tensors = {
        "order": order.int(),
        "places": torch.where(places >= 0, order[places.clamp(min=0)], -1).int(),
        "rates": rates,
        "key_mean": coder.key_mean.cpu().float(),
        "scaled_mean": scaled.float(),
        "value_mean": coder.value_mean.cpu().float(),
        "gains": gains.float(),
        "key_masks": masks_of_tokens(by_block[:, :, : spec.key_fields]),
        "all_masks": masks_of_units(by_block),
        "fast_maps": fast_fragments(keys, turning),
        "slow_maps": slow_fragments(keys, turning),
        "slow_terms": slow_terms(rates, turning.half_chunk),
        "steps": steps_of(rates, sizes),
        "starts": starts.float().unflatten(1, (-1, 4, 2)).repeat(1, 1, 1, 2),
        "table": rotation_table(rates, sizes.chunk)[:: sizes.tiles],
        "offsets": (1024 + by_block.double() / 2).flatten(1).float(),
        "values_of": values.unflatten(1, (-1, 16)).transpose(2, 3).flatten(1, 3).float(),
        "key_encode": coder.key_encode.cpu().float().mT,
        "predict": coder.predict.cpu().float(),
        "value_encode": coder.value_encode.cpu().float().mT,
        "levels": torch.exp2(units.widths.float()),
        "bits": units.offsets.int(),
    }
    return Prepared(**{name: tensor.contiguous().to(device) for name, tensor in tensors.items()}, turning=turning)


def by_speed(places: Tensor, coder: Coder, half: int) -> tuple[Tensor, Tensor]:
    """Places and rates of pairs, the fastest first."""
    rates = torch.zeros(half, dtype=torch.float32)
    if coder.spec.pairs:
        rates[: coder.spec.pairs] = coder.rates.cpu().view(torch.float32)
    fastest = rates.abs().argsort(descending=True, stable=True)
    return torch.cat([places[:half][fastest], places[half:][fastest]]), rates[fastest]


def turning_of(maps: Tensor, rates: Tensor) -> Turning:
    """Chunks of 128 tokens, unless shorter ones have fewer fast pairs. `maps` as in `fragments_of`."""
    half_chunk, groups = min(
        ((n, -(-int((rates.abs() * n / 2 > SLOW).sum()) // 16)) for n in (64, 32)), key=lambda x: x[1]
    )
    written = (maps != 0).unflatten(3, (2, -1)).unflatten(1, (-1, 16)).any(0).any(1).any(2)  # blocks fields pairs
    written = written.flatten(0, 1)
    fast, slow = (x.any(1) for x in written.split([16 * groups, len(rates) - 16 * groups], 1))
    return Turning(
        groups, half_chunk, *(sum(1 << i for i, x in enumerate(kind.tolist()) if x) for kind in (fast, slow))
    )


def slow_terms(rates: Tensor, half_chunk: int) -> Tensor:
    """Of every pair cos and sin of the middle of half a chunk, and c and k: around it, cos ≈ c and sin ≈ k · place."""
    middle = (half_chunk - 1) / 2
    place = torch.arange(half_chunk).double() - middle
    angle, there = place * rates.double()[:, None], middle * rates.double()
    terms = [there.cos(), there.sin(), angle.cos().mean(1), (angle.sin() * place).sum(1) / place.square().sum()]
    return torch.stack(terms, 1).float()


def steps_of(rates: Tensor, sizes: Sizes) -> Tensor:
    """Of every pair cos and sin of what a query turns by from chunk to chunk of a warp, and within a chunk."""
    half, groups = sizes.turning.half_chunk, sizes.turning.fast_groups
    far = torch.full_like(rates, sizes.chunk * sizes.warps, dtype=torch.float64)
    far[16 * groups :] -= sizes.chunk - half  # slow pairs are at the second half of the last of the chunks
    angles = [rates.double() * n for n in (far, half)]
    return torch.stack([f(angle) for angle in angles for f in (torch.cos, torch.sin)], 1).float()


def kernel_places(pairs: int, size: int, half: int) -> Tensor:
    """The dimensions of a head in two halves, of which the first is turned with the second; −1 fills up.

    Dimensions in no pair are turned by nothing, so they make pairs of their own.
    """
    rest = size - 2 * pairs
    first = [*range(pairs), *range(2 * pairs, 2 * pairs + (rest + 1) // 2)]
    second = [*range(pairs, 2 * pairs), *range(2 * pairs + (rest + 1) // 2, size)]
    return torch.tensor([*first, *[-1] * (half - len(first)), *second, *[-1] * (half - len(second))])


def two(low: Tensor, high: Tensor) -> Tensor:
    """Two 16-bit numbers in 32 bits."""
    both = (low.long() & 0xFFFF) | ((high.long() & 0xFFFF) << 16)
    return torch.where(both >= 1 << 31, both - (1 << 32), both).to(torch.int32)


def bits_of(numbers: Tensor) -> Tensor:
    return numbers.half().view(torch.int16)


def masks_of_tokens(masks: Tensor) -> Tensor:
    """(sets, blocks, fields, 16) masks for fragments whose rows are tokens: of neighbouring units, for four lanes."""
    pair = two(masks[..., 0::2], masks[..., 1::2])  # of units 0 and 1, 2 and 3, …
    return torch.stack([pair[..., :4], pair[..., 4:]], -1)


def masks_of_units(masks: Tensor) -> Tensor:
    """The same for fragments whose rows are units: of one unit twice, for eight lanes."""
    twice = two(masks, masks)
    return torch.stack([twice[..., :8], twice[..., 8:]], -1)


def fragments_of(maps: Tensor) -> Tensor:
    """(key heads, units, fields, dimensions) as operands of tensor cores: 16 units by 8 dimensions, lane by lane."""
    tiles = bits_of(maps).unflatten(1, (-1, 16)).unflatten(4, (-1, 8))  # heads blocks 16 fields tiles 8
    tiles = tiles.permute(0, 1, 3, 4, 5, 2)  # heads blocks fields tiles dimension unit
    pair = two(tiles[..., 0::2], tiles[..., 1::2])  # … dimension, pairs of units
    return torch.stack([pair[..., :4], pair[..., 4:]], -1).flatten(4, 5)


def members(fragments: int) -> list[int]:
    """The members of a set of fragments."""
    return [i for i in range(fragments.bit_length()) if fragments >> i & 1]


def fast_fragments(maps: Tensor, turning: Turning) -> Tensor:
    """The maps to keys of fast pairs: both dimensions of eight pairs side by side."""
    tiles = fragments_of(maps).flatten(1, 2).unflatten(2, (2, -1))  # heads fragments halves tiles lanes registers
    chosen = tiles[:, members(turning.fast_fragments), :, : 2 * turning.fast_groups]
    return chosen.permute(0, 1, 3, 4, 2, 5).flatten(4)


def slow_fragments(maps: Tensor, turning: Turning) -> Tensor:
    """The maps to keys of slow pairs, transposed: 16 dimensions by 8 units, both of every pair side by side."""
    both = bits_of(maps).unflatten(3, (2, -1, 16))[:, :, :, :, turning.fast_groups :]
    both = both.unflatten(1, (-1, 2, 8))  # heads blocks halves units fields, dimensions of a pair, groups, 16
    both = both.permute(0, 1, 4, 2, 6, 3, 5, 7).flatten(1, 2)  # heads fragments halves groups units dimensions 16
    pair = two(both[..., 0::2], both[..., 1::2]).unflatten(-1, (2, 4))  # … registers lanes
    return pair[:, members(turning.slow_fragments)].permute(0, 1, 2, 3, 4, 7, 5, 6).flatten(4, 5).flatten(5)


def rotation_table(rates: Tensor, tokens: int) -> Tensor:
    """cos − 1 and sin of the places in a chunk, as fragments of 16 tokens by 16 pairs."""
    angle = torch.arange(tokens).double()[:, None] * rates.double()
    kinds = []
    for numbers in (bits_of(-2 * (angle / 2).sin().square()), bits_of(angle.sin())):
        pair = two(numbers[:, 0::2], numbers[:, 1::2])
        pair = pair.unflatten(0, (-1, 2, 8)).unflatten(3, (-1, 2, 4))  # tiles, half of 16, row, groups, register, lane
        kinds.append(pair.permute(0, 3, 2, 5, 4, 1).flatten(4).flatten(2, 3))  # tiles groups lanes registers
    return torch.stack(kinds, 2)


@torch.library.custom_op(f"{NAMESPACE}::encode", mutates_args=())
def encode_token(coder: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the exponents of one new token: (b, sets, 1, bytes) and (b, sets, 1, 1)."""
    own = CODERS[coder]
    spec, maps = own.spec, prepared(own)
    sizes = sizes_of(spec, maps.turning, False, key.dtype)
    rows = torch.empty(len(key), spec.n_sets, 1, 2 * spec.n_units, dtype=torch.uint8, device=key.device)
    exponents = torch.empty(len(key), spec.n_sets, 1, 1, dtype=torch.uint8, device=key.device)
    memory = 4 * (spec.set_keys + spec.set_values + spec.n_units * (spec.key_fields + spec.value_fields))
    args: list[Any] = [
        key.contiguous(),
        value.contiguous(),
        positions.contiguous(),
        maps.order,
        maps.rates,
        maps.key_mean,
    ]
    args += [maps.value_mean, maps.key_encode, maps.predict, maps.value_encode, maps.levels, maps.bits, rows, exponents]
    args += [spec.pairs, spec.key_heads, spec.key_heads // spec.n_sets]
    kernel = compiled(sizes, key.device.index or 0).encode
    kernel(grid=(spec.n_sets, len(key), 1), block=(128, 1, 1), shared_mem=memory, args=args)
    return rows, exponents


@encode_token.register_fake
def _(coder: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    spec = CODERS[coder].spec
    rows = key.new_empty(len(key), spec.n_sets, 1, 2 * spec.n_units, dtype=torch.uint8)
    return rows, key.new_empty(len(key), spec.n_sets, 1, 1, dtype=torch.uint8)


@torch.library.custom_op(f"{NAMESPACE}::decode", mutates_args=())
def decode_token(
    coder: int,
    query: Tensor,
    rows: Tensor,
    exponents: Tensor,
    mask: Tensor | None,
    first: list[Tensor],
    new: list[Tensor],
    span: list[Tensor],
    scaling: float,
) -> Tensor:
    """Attention of one new token, (b, h, 1, d).

    `first` and `new` are keys and values of the first tokens and of the current one. `span` are the row of the current
    token, and of every sequence the row in which it starts.
    """
    own = CODERS[coder]
    spec, maps = own.spec, prepared(own)
    sizes = sizes_of(spec, maps.turning, mask is not None, query.dtype)
    kernels = compiled(sizes, query.device.index or 0)
    batch, tokens = len(query), rows.shape[2]
    heads = spec.key_heads // spec.n_sets
    parts = planned_parts(sizes, spec.key_heads * sizes.turns * batch, tokens, query.device.index or 0)
    query, rows, exponents = query.contiguous(), rows.contiguous(), exponents.contiguous()
    gathered = torch.empty(batch, spec.heads, parts, sizes.slots, dtype=torch.float32, device=query.device)
    logs = torch.empty(batch, spec.heads, parts, 4, dtype=torch.float32, device=query.device)
    high, start = (x.to(torch.int32) for x in span)
    low = (start + spec.first).clamp(min=0)
    seen = query if mask is None else mask.expand(batch, 1, 1, -1).contiguous()
    seen_stride = 0 if mask is None else mask.shape[3]
    args: list[Any] = [
        query,
        rows,
        exponents,
        seen,
        maps.key_masks,
        maps.all_masks,
        maps.fast_maps,
        maps.slow_maps,
        maps.starts,
        maps.scaled_mean,
    ]
    args += [
        maps.gains,
        maps.rates,
        maps.steps,
        maps.slow_terms,
        maps.places,
        maps.table,
        gathered,
        logs,
        low,
        high,
        start,
    ]
    args += [scaling * LOG2E, tokens, spec.key_heads, heads, seen_stride]
    grid = (parts, spec.key_heads * sizes.turns, batch)
    kernels.decode(grid=grid, block=(32 * sizes.warps, 1, 1), shared_mem=sizes.shared_bytes(), args=args)
    out = torch.empty(batch, spec.heads, 1, spec.d_v, dtype=query.dtype, device=query.device)
    exact = [x.to(query.dtype).contiguous() for x in (*first, *new)]
    args = [gathered, logs, maps.offsets, maps.values_of, maps.value_mean, query, *exact, seen, out, high, start]
    args += [scaling * LOG2E, parts, spec.first, spec.key_heads, heads, seen_stride]
    grid, memory = (spec.key_heads * sizes.turns, batch, 1), sizes.join_bytes(spec.first)
    kernels.join(grid=grid, block=(JOIN_THREADS, 1, 1), shared_mem=memory, args=args)
    return out


@decode_token.register_fake
def _(
    coder: int,
    query: Tensor,
    rows: Tensor,
    exponents: Tensor,
    mask: Tensor | None,
    first: list[Tensor],
    new: list[Tensor],
    span: list[Tensor],
    scaling: float,
) -> Tensor:
    return query.new_empty(len(query), query.shape[1], 1, CODERS[coder].spec.d_v)


def planned_parts(sizes: Sizes, programs: int, tokens: int, device: int) -> int:
    """Among how many programs the tokens of a sequence are divided, for the least time: rounds times their length."""
    places, chunks = processors(device) * PER_PROCESSOR, math.ceil(tokens / sizes.chunk)

    def time(parts: int) -> int:
        rounds = math.ceil(math.ceil(chunks / parts) / sizes.warps)
        return math.ceil(programs * parts / places) * (rounds + START)

    most = max(1, math.ceil(chunks / sizes.warps))
    return min(range(1, min(most, 4 * places) + 1), key=time)


@lru_cache(maxsize=64)
def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
