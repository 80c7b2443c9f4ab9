"""Attention of one new token to packed keys and values on a GPU: each is read once, for all the query heads it serves.

It needs torch and Triton alone, so that it can travel with the checkpoint; where there is no Triton, it cannot be
imported. The tokens are split among programs; each keeps its own softmax in float32, and a second kernel joins them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:  # transformers refuses code that travels with a checkpoint if what it imports elsewhere is missing
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("the kernel for decoding needs Triton") from error

SCAN: Any = tl.constexpr(2048)  # numbers of the mask that are looked at together
FAR: Any = tl.constexpr(-1e30)  # below every score; finite, so that differences stay numbers
LOG2E: Any = tl.constexpr(1.4426950408889634)

TILE_BYTES = 32 << 10  # of keys and values that are loaded together
STAGES = 3  # tiles on their way
PER_PROCESSOR = 4  # programs for each multiprocessor
SHORTEST = 256  # tokens that are worth a program
LARGEST = 1 << 15  # numbers that a program can gather


@dataclass(frozen=True)
class Plan:
    """How the work is cut: tokens of a tile, warps, tiles on their way, and among how many programs a row is split."""

    tile: int
    warps: int
    stages: int
    parts: int


@triton.jit
def place(index, sizes):  # type: ignore[no-untyped-def]
    """How much lies before one of several heads, and how large it is; a single size is that of all."""
    if len(sizes) == 1:
        before = index * sizes[0]
        size = index * 0 + sizes[0]
    else:
        before = index * 0
        size = index * 0
        for i in tl.static_range(len(sizes)):
            before += tl.where(index > i, sizes[i], 0)
            size += tl.where(index == i, sizes[i], 0)
    return before, size


@triton.jit
def columns_of(query, places, before, size, inside, start: tl.constexpr, width: tl.constexpr, chosen: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some columns of the queries, (rows, width): those of the kept places, and zero beyond their number."""
    column = start + tl.arange(0, width)
    there = inside[:, None] & (column[None, :] < size[:, None])
    at = column[None, :] + 0 * size[:, None]
    if chosen:
        at = tl.load(places + before[:, None] + column[None, :], mask=there, other=0)
    return tl.load(query[:, None] + at, mask=there, other=0.0)


@triton.jit
def seen_in(mask, least, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return mask > least if kind == 2 else mask != 0


@triton.jit
def seen_range(mask, length, least, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first number of the mask that lets something be seen, and the one behind the last."""
    places = tl.arange(0, SCAN)
    first = places * 0 + length
    last = places * 0
    for start in range(0, length, SCAN):
        at = start + places
        seen = seen_in(tl.load(mask + at, mask=at < length, other=0), least, kind) & (at < length)
        first = tl.minimum(first, tl.where(seen, at, length))
        last = tl.maximum(last, tl.where(seen, at + 1, 0))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit
def tile_of(states, step, size, here, start: tl.constexpr, width: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile, width) of keys or values, zero beyond the size of the head."""
    column = start + tl.arange(0, width)
    at = tl.arange(0, tile)[:, None] * step + column[None, :]
    return tl.load(states + at, mask=here[:, None] & (column[None, :] < size), other=0.0)


@triton.jit
def chosen_rows(x, own, index, sets: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero in the rows that another set of keys or values serves."""
    return x if sets == 1 else tl.where((own == index)[:, None], x, 0.0)


@triton.jit(
    do_not_specialize=[
        "length",
        "key_row",
        "key_head",
        "value_row",
        "value_head",
        "mask_row",
    ]
)
def gather_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    mask,
    words,  # the mask, several tokens in one number
    places,
    out,
    logs,
    key_sizes,  # sizes and strides of the cache are counted in units, so that loads are known to be aligned
    value_sizes,
    length,
    scaling,
    least,
    query_row,
    query_head,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    mask_row,
    unit: tl.constexpr,
    served: tl.constexpr,  # query heads of one program
    rows: tl.constexpr,
    key_sets: tl.constexpr,
    value_sets: tl.constexpr,
    key_main: tl.constexpr,
    key_rest: tl.constexpr,
    value_main: tl.constexpr,
    value_rest: tl.constexpr,
    width: tl.constexpr,  # of the output
    kind: tl.constexpr,  # of the mask: 0 none, 1 boolean, 2 added
    word: tl.constexpr,
    chosen: tl.constexpr,
    alone: tl.constexpr,
    tile: tl.constexpr,
):
    """One part of the tokens, for all query heads that share keys or values: their softmax and what it gathers."""
    part = tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, rows)
    inside = row < served
    head = group * served + row
    own_key = head // (served // key_sets)
    own_value = head // (served // value_sets)

    own_before, own_size = place(own_key, key_sizes)
    own_before *= unit
    own_size *= unit
    queries = query + batch * query_row + head * query_head
    q_main = columns_of(queries, places, own_before, own_size, inside, 0, key_main, chosen)
    if key_rest > 0:
        q_rest = columns_of(queries, places, own_before, own_size, inside, key_main, key_rest, chosen)

    first = length * 0
    last = length
    masks = mask + batch * mask_row
    if kind > 0:
        first, last = seen_range(words + batch * (mask_row // word), length // word, least, kind)
        first *= word
        last *= word
    each = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), tl.num_programs(0)), tile) * tile
    begin = first + part * each
    end = tl.minimum(begin + each, last)

    top = tl.full([rows], FAR, tl.float32)
    total = tl.zeros([rows], tl.float32)
    main = tl.zeros([rows, value_main], tl.float32)
    if value_rest > 0:
        rest = tl.zeros([rows, value_rest], tl.float32)
    for at in range(begin, end, tile):
        token = at + tl.arange(0, tile)
        here = token < end
        scores = tl.zeros([rows, tile], tl.float32)
        keys = key + (batch * key_row + tl.cast(at, tl.int64) * key_token) * unit
        for i in tl.static_range(key_sets):
            index = group * key_sets + i
            before, size = place(index, key_sizes)
            if len(key_sizes) == 1:
                before = index * key_head
            k = tile_of(keys + before * unit, key_token * unit, size * unit, here, 0, key_main, tile)
            scores = tl.dot(chosen_rows(q_main, own_key, index, key_sets), tl.trans(k), scores, input_precision="ieee")
            if key_rest > 0:
                k = tile_of(keys + before * unit, key_token * unit, size * unit, here, key_main, key_rest, tile)
                q = chosen_rows(q_rest, own_key, index, key_sets)
                scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        scores *= scaling * LOG2E
        if kind > 0:
            added = tl.load(masks + token, mask=here, other=0)
            here = here & seen_in(added, least, kind)
            if kind == 2:
                scores += added.to(tl.float32)[None, :] * LOG2E
        scores = tl.where(here[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        main = main * shrink[:, None]
        if value_rest > 0:
            rest = rest * shrink[:, None]
        values = value + (batch * value_row + tl.cast(at, tl.int64) * value_token) * unit
        for i in tl.static_range(value_sets):
            index = group * value_sets + i
            before, size = place(index, value_sizes)
            if len(value_sizes) == 1:
                before = index * value_head
            w = chosen_rows(weights, own_value, index, value_sets).to(value.dtype.element_ty)
            v = tile_of(values + before * unit, value_token * unit, size * unit, token < end, 0, value_main, tile)
            main = tl.dot(w, v, main, input_precision="ieee")
            if value_rest > 0:
                v = tile_of(
                    values + before * unit, value_token * unit, size * unit, token < end, value_main, value_rest, tile
                )
                rest = tl.dot(w, v, rest, input_precision="ieee")

    by = 1.0 / tl.where(total > 0, total, 1.0)
    to = (batch * (tl.num_programs(1) * served) + head) * tl.num_programs(0) + part
    column = tl.arange(0, value_main)
    tl.store(
        out + to[:, None] * width + column[None, :],
        (main * by[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (column[None, :] < width),
    )
    if value_rest > 0:
        column = value_main + tl.arange(0, value_rest)
        tl.store(
            out + to[:, None] * width + column[None, :],
            (rest * by[:, None]).to(out.dtype.element_ty),
            mask=inside[:, None] & (column[None, :] < width),
        )
    if not alone:
        tl.store(logs + to, top + tl.log2(total), mask=inside)


@triton.jit
def join_kernel(parts, logs, out, n: tl.constexpr, width: tl.constexpr, many: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the parts of one row have gathered, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, many)
    column = tl.arange(0, wide)
    log = tl.load(logs + row * n + part, mask=part < n, other=-float("inf"))
    share = tl.exp2(log - tl.maximum(tl.max(log, 0), FAR))
    total = tl.sum(share, 0)
    share = share / tl.where(total > 0, total, 1.0)
    there = (part < n)[:, None] & (column < width)[None, :]
    found = tl.load(parts + (row * n + part[:, None]) * width + column[None, :], mask=there, other=0.0)
    joined = tl.sum(found * share[:, None], 0)
    tl.store(out + row * width + column, joined.to(out.dtype.element_ty), mask=column < width)


def power(number: int) -> int:
    """The power of two that holds so many, 16 or more: less a matrix product does not take."""
    return max(16, 1 << (number - 1).bit_length())


def two_powers(width: int) -> tuple[int, int]:
    """Two powers of two, or one and zero, that hold so many columns with little to spare: 96 is 64 and 32."""
    whole = power(width)
    main, rest = whole // 2, power(width - whole // 2)
    return (main, rest) if rest < main else (whole, 0)


@functools.cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def planned(query: Tensor, key: Tensor, value: Tensor, keys: Sequence[int], values: Sequence[int]) -> Plan:
    """A plan by the bytes of a token and the number of multiprocessors."""
    groups = math.gcd(len(keys), len(values))
    padded = [sum(two_powers(max(sizes))) * len(sizes) // groups for sizes in (keys, values)]
    tile = max(16, min(128, 1 << (TILE_BYTES // (sum(padded) * key.element_size())).bit_length() - 1))
    rows = power(query.shape[1] // groups)
    wanted = PER_PROCESSOR * processors(query.device) // (query.shape[0] * groups)
    parts = max(1, min(wanted, -(-key.shape[2] // SHORTEST)))
    return Plan(tile, 4 if rows * padded[1] <= 8192 else 8, STAGES, parts)


def gathers(query: Tensor, key: Tensor, value: Tensor, keys: Sequence[int], values: Sequence[int]) -> bool:
    """Whether the kernel can serve these: rows without gaps, and not more than a program can hold."""
    groups = math.gcd(len(keys), len(values))
    rows = power(query.shape[1] // groups)
    dense = all(x.stride(-1) == 1 for x in (query, key, value))
    floats = query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
    small = rows * sum(two_powers(max(values))) <= LARGEST and rows * sum(two_powers(max(keys))) <= LARGEST
    return dense and floats and small and max(values) > 0


def in_units(states: Tensor, sizes: Sequence[int], unit: int) -> tuple[tuple[int, ...], int, int, int]:
    """Sizes (one if all are the same) and strides of rows, heads and tokens."""
    row, head, token = (x // unit for x in states.stride()[:3])
    if states.shape[1] < len(sizes):  # side by side
        head = sizes[0] // unit
    return tuple(s // unit for s in (sizes[:1] if len(set(sizes)) == 1 else sizes)), row, head, token


def unit_of(states: Tensor, sizes: Sequence[int]) -> int:
    """The largest power of two, up to 16 bytes, that divides all sizes and strides."""
    return math.gcd(16 // states.element_size(), *sizes, *states.stride()[:3])


def mask_rows(mask: Tensor, batch: int) -> Tensor:
    """(batch, tokens), as numbers, without gaps in a row."""
    rows = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask)[:, 0, 0].expand(batch, -1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def decoded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Tensor | None,
    keys: Sequence[int],
    values: Sequence[int],
    scaling: float,
    plan: Plan,
) -> Tensor:
    """softmax(scaling · Q Kᵀ + mask) V of one token, (b, h, 1, largest of `values`); a row that sees nothing gives 0.

    Keys and values are (b, sets, t, size), or those of different sizes side by side in (b, 1, t, all). Every set of
    keys, and every set of values, serves as many neighbouring query heads.
    """
    b, h, length = query.shape[0], query.shape[1], key.shape[2]
    groups, width, parts = math.gcd(len(keys), len(values)), max(values), plan.parts
    unit = math.gcd(unit_of(key, keys), unit_of(value, values))
    key_sizes, *key_steps = in_units(key, keys, unit)
    value_sizes, *value_steps = in_units(value, values, unit)
    key_main, key_rest = two_powers(max(keys))
    value_main, value_rest = two_powers(width)
    kind, word, least = 0, 1, 0.0
    seen = words = query
    if mask is not None:
        kind, least = (1, 0.0) if mask.dtype == torch.bool else (2, torch.finfo(mask.dtype).min)
        seen = words = mask_rows(mask, b)
        if kind == 1 and not any(x % 8 for x in (length, seen.stride(0), seen.data_ptr())):
            word, words = 8, seen.view(torch.int64)
    out = torch.empty(b, h, 1, width, device=query.device, dtype=query.dtype)
    gathered, logs = out, out
    if parts > 1:
        gathered = torch.empty(b, h, parts, width, device=query.device, dtype=torch.float32)
        logs = torch.empty(b, h, parts, device=query.device, dtype=torch.float32)
    gather_kernel[(parts, groups, b)](
        query,
        key,
        value,
        seen,
        words,
        query if places is None else places,
        gathered,
        logs,
        key_sizes,
        value_sizes,
        length,
        scaling,
        least,
        query.stride(0),
        query.stride(1),
        *key_steps,
        *value_steps,
        seen.stride(0),
        unit=unit,
        served=h // groups,
        rows=power(h // groups),
        key_sets=len(keys) // groups,
        value_sets=len(values) // groups,
        key_main=key_main,
        key_rest=key_rest,
        value_main=value_main,
        value_rest=value_rest,
        width=width,
        kind=kind,
        word=word,
        chosen=places is not None,
        alone=parts == 1,
        tile=plan.tile,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    if parts > 1:
        sizes = {"many": power(parts), "wide": power(width)}
        join_kernel[(b * h,)](gathered, logs, out, parts, width, **sizes, num_warps=4)
    return out


# Several checkpoints may each bring this file: each has an operator of its own.
@torch.library.custom_op(
    "deadweight::" + re.sub(r"\W", "_", __name__),
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? places, int[] keys, int[] values, "
    "float scaling) -> Tensor",
)
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Tensor | None,
    keys: Sequence[int],
    values: Sequence[int],
    scaling: float,
) -> Tensor:
    """`decoded` by the plan for its shapes, as one operator for torch.compile."""
    return decoded(query, key, value, mask, places, keys, values, scaling, planned(query, key, value, keys, values))


@decode.register_fake
def shape_decoded(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    values = rest[3]
    return query.new_empty(query.shape[0], query.shape[1], 1, max(values))
