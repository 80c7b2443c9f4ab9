"""Decoding from a coded cache on an NVIDIA GPU: three kernels, compiled for the sizes of an attention when it first
runs.

- `encode` makes the row of one new token, in one launch.
- `decode` reads rows once for up to four query heads of a key head. Every warp takes a few chunks of 128 or 64 tokens
  at a time. It makes float16 numbers of codes by masks, scores of these numbers on tensor cores, and gathers the
  *numbers* of codes by the softmax, in float32: values are made once, at the end.
- `join` adds up what all programs have gathered, makes values of it, and adds the tokens that are not coded.

Rotary positions are split: the query is turned to the start of the chunk, in float32, and what is left is the place of
a token in the chunk.

- *Fast pairs*: keys are made of the numbers by a map, summed in float16, and turned by their place, for which one table
  of float16 serves all. The bits of a code, alone, are a subnormal float16: no offset must be subtracted.
- *Slow pairs* turn by less than 0.06 within a quarter of a chunk. There the map is applied to the query instead, once
  for half a chunk, and the rotation is replaced by c + k · place, the best such line: its error is that of float16.
- *The mean of the keys* may be large. What it adds to a score is a product of the query with that table, which has
  cos − 1 in place of cos: then only what changes within a chunk is rounded.

Only CUDA's own compiler is needed, which comes with torch. Elsewhere, and for what the kernels do not know (a soft cap,
sinks, more than one new token, heads of more than 128 dimensions, gradients), `coded_attention.py` has the same in
torch operations.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionOptions
from .coder import CODERS, Coder
from .cuda_source import SOURCES
from .kernel_operands import prepared
from .kernel_sizes import ENCODE_THREADS, JOIN_THREADS, KINDS, PLAIN_ROOM, Sizes, largest_sizes, sizes_of

MOST_DIMENSIONS = 128  # of a head
MOST_FRAGMENTS = 64  # of the codes of keys
START = 2  # chunks of tokens in whose time a program of `decode` starts and ends
LOG2E = 1.4426950408889634
NAMESPACE = f"deadweight_{zlib.crc32(__name__.encode()):x}"  # a checkpoint brings a copy of this file along


@dataclass(frozen=True)
class Kernels:
    encode: Any
    decode: Any
    join: Any


@lru_cache(maxsize=256)
def compiled(sizes: Sizes, device: int) -> Kernels:
    """The kernels for these sizes, on the current device; compiling takes a second or two."""
    defines = "".join(f"#define {name} {value}\n" for name, value in sizes.defines().items())
    compile_kernel = torch.cuda._compile_kernel
    kernels = Kernels(
        **{name: compile_kernel(defines + own, name, nvcc_options=["--std=c++17"]) for name, own in SOURCES.items()}
    )
    if sizes.shared_bytes() >= 48 << 10:
        kernels.decode.set_shared_memory_config(sizes.shared_bytes())
    return kernels


def fitting(coder: Coder, states: Tensor) -> bool:
    """Whether the kernels know this attention, on this device."""
    spec = coder.spec
    if states.device.type != "cuda" or torch.version.cuda is None or states.dtype not in KINDS:
        return False
    if spec.n_units % 8 or max(spec.d_qk, spec.d_v) > MOST_DIMENSIONS or torch.is_grad_enabled() or not coder.rounds:
        return False
    if -(-spec.n_units // 16) * spec.key_fields > MOST_FRAGMENTS:
        return False
    return most_shared_bytes(coder.number) <= shared_room(states.device.index or 0)


@torch.compiler.assume_constant_result
def most_shared_bytes(coder: int) -> int:
    """Shared memory that a program takes at most; more than there is if `join` does not run with what it gets."""
    spec = CODERS[coder].spec
    sizes = largest_sizes(spec, torch.float32)
    return sizes.shared_bytes() if sizes.join_bytes(spec.first) <= PLAIN_ROOM else 1 << 30


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
    plain = plain and options.softcap is None and options.sinks is None and not options.dropout
    return query.shape[2] == 1 and plain and fitting(coder, query)


@torch.library.custom_op(f"{NAMESPACE}::encode", mutates_args=())
def encode_token(coder: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the exponents of one new token: (b, sets, 1, bytes) and (b, sets, 1, 1)."""
    own = CODERS[coder]
    spec, maps = own.spec, prepared(own)
    sizes = sizes_of(spec, maps.turning, False, key.dtype)
    rows = torch.empty(len(key), spec.n_sets, 1, 2 * spec.n_units, dtype=torch.uint8, device=key.device)
    exponents = torch.empty(len(key), spec.n_sets, 1, 1, dtype=torch.uint8, device=key.device)
    args: list[Any] = [
        key.contiguous(),
        value.contiguous(),
        positions.contiguous(),
        maps.order,
        maps.rates,
        maps.key_mean,
    ]
    args += [maps.value_mean, maps.key_encode, maps.predict, maps.value_encode, maps.levels, maps.bits, rows, exponents]
    args += [spec.pairs, spec.key_heads, spec.key_heads // spec.n_sets, len(key)]
    kernel = compiled(sizes, key.device.index or 0).encode
    grid = (spec.n_sets, -(-len(key) // sizes.encode_rows), 1)
    kernel(grid=grid, block=(ENCODE_THREADS, 1, 1), shared_mem=sizes.encode_bytes(), args=args)
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
    token, and of every sequence the row in which it starts and the row of position 0.
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
    high, start, origin = (x.contiguous() for x in span)
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
        start,
        high,
        origin,
    ]
    args += [scaling * LOG2E, tokens, spec.key_heads, heads, seen_stride, spec.first]
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
    places, chunks = processors(device) * sizes.programs, math.ceil(tokens / sizes.chunk)

    def time(parts: int) -> int:
        rounds = math.ceil(math.ceil(chunks / parts) / sizes.warps)
        return math.ceil(programs * parts / places) * (rounds + START)

    most = max(1, math.ceil(chunks / sizes.warps))
    return min(range(1, min(most, 4 * places) + 1), key=time)


@lru_cache(maxsize=64)
def processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
