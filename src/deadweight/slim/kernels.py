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
FREE = (  # numbers of which a kernel is compiled but once: layers differ in them
    "length",
    "key_row",
    "key_head",
    "key_token",
    "value_row",
    "value_head",
    "value_token",
    "mask_row",
    "width",
)

TILE_BYTES = 32 << 10  # of keys and values that are loaded together
STAGES = 3  # tiles on their way
PER_PROCESSOR = 2  # programs for each multiprocessor, or up to twice as many
FULL = 0.9  # of the places for programs that should be taken to the end
SHORTEST = 256  # tokens that are worth a program
LEAST = 8  # times as many bytes read as those of what is gathered
LARGEST = 1 << 15  # numbers that a program can gather
FEW = 16  # parts of a row that one program can join
ROWS = 16  # of a matrix product, at least
MANY_BYTES = 48 << 10  # of the maps that expand late keys: they leave no room for a second program
BESIDES = 8 << 10  # bytes of shared memory besides maps and tiles


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
def block(group, sets: tl.constexpr, sizes, head, unit: tl.constexpr, apart: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the neighbouring heads of one group start, and how many numbers of a token they have together."""
    start = place(group * sets, sizes)[0]
    size = place(group * sets + sets, sizes)[0] - start
    start = group * head if apart else start // unit
    return start * unit, size // unit * unit


@triton.jit
def own_columns(index, group, sets: tl.constexpr, sizes, start: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """For rows and columns of a group's block: the place in the row's own head, and whether there is one."""
    before, size = place(index, sizes)
    column = start + tl.arange(0, width)[None, :] - (before - place(group * sets, sizes)[0])[:, None]
    return column, (column >= 0) & (column < size[:, None])


@triton.jit
def columns_of(  # type: ignore[no-untyped-def]
    query,
    places,
    turns,
    inside,
    index,
    share,
    group,
    sets: tl.constexpr,
    shares: tl.constexpr,
    sizes,
    start: tl.constexpr,
    width: tl.constexpr,
    chosen: tl.constexpr,
    turned: tl.constexpr,
):
    """Some columns of the queries, (rows, width): each row has its own where its keys lie, and else zero.

    The columns are places of the query in their order, or those that are chosen. Turned: first and then second places
    of planes, and (a, b) becomes (αa + βb, αb − βa), with numbers that are the query head's own.
    """
    at, there = own_columns(index, group, sets, sizes, start, width)
    there = there & inside[:, None]
    before, size = place(index, sizes)
    before = before[:, None]
    if turned:
        half = size[:, None] // 2
        second = at >= half
        plane = tl.where(second, at - half, at)
        other = tl.where(second, plane, at + half)
        own = turns + before * shares + share[:, None] * size[:, None] + plane
        along = tl.load(own, mask=there, other=0.0).to(tl.float32)
        across = tl.load(own + half, mask=there, other=0.0).to(tl.float32)
        first = tl.load(places + before + at, mask=there, other=0)
        other = tl.load(places + before + other, mask=there, other=0)
        a = tl.load(query[:, None] + first, mask=there, other=0.0)
        b = tl.load(query[:, None] + other, mask=there, other=0.0)
        return (along * a + tl.where(second, -across, across) * b).to(a.dtype)
    else:
        if chosen:
            at = tl.load(places + before + at, mask=there, other=0)
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
def store(out, found, to, inside, index, group, sets: tl.constexpr, sizes, start: tl.constexpr, width):  # type: ignore[no-untyped-def]
    """What each row has gathered of its own values; of a group that shares them, zeros behind them too."""
    columns: tl.constexpr = found.shape[1]
    at, there = own_columns(index, group, sets, sizes, start, columns)
    if sets == 1:
        there = at < width
    tl.store(out + to[:, None] * width + at, found.to(out.dtype.element_ty), mask=there & inside[:, None])


@triton.jit
def turned_places(places, planes: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first places of all planes and then their second ones, each filled up to `wide`; and which there are."""
    index = tl.arange(0, 2 * wide)
    plane = index % wide
    there = plane < planes
    return tl.load(places + index // wide * planes + plane, mask=there, other=0), there


@triton.jit
def expansions(  # type: ignore[no-untyped-def]
    expand, row, there, kept, heads: tl.constexpr, size: tl.constexpr, start: tl.constexpr, width: tl.constexpr
):
    """For each of the joined heads: what makes its turned places of some kept columns, (width, places)."""
    column = start + tl.arange(0, width)
    there = there[None, :] & (column < kept)[:, None]
    found = ()
    for i in tl.static_range(heads):
        at = (i * size + row)[None, :] * kept + column[:, None]
        found = found + (tl.load(expand + at, mask=there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def asked_of(queries, row, there, member, heads: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each of the joined heads: the turned places of the queries that meet it, (places, rows); of others zero."""
    found = ()
    for i in tl.static_range(heads):
        own = there[:, None] & (member == i)[None, :]
        found = found + (tl.load(queries[None, :] + row[:, None], mask=own, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def asked_constant(queries, shift, places, inside, planes: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the constant of its key head, turned, adds to a query's score: by cosines and then sines, (2 wide, rows)."""
    index = tl.arange(0, 2 * wide)
    plane = index % wide
    there = (plane < planes)[:, None] & inside[None, :]
    a = tl.load(places + plane, mask=plane < planes, other=0)[:, None]
    b = tl.load(places + planes + plane, mask=plane < planes, other=0)[:, None]
    a_asked = tl.load(queries[None, :] + a, mask=there, other=0.0)
    b_asked = tl.load(queries[None, :] + b, mask=there, other=0.0)
    a_shift = tl.load(shift[None, :] + a, mask=there, other=0.0).to(tl.float32)
    b_shift = tl.load(shift[None, :] + b, mask=there, other=0.0).to(tl.float32)
    with_cos = a_asked * a_shift + b_asked * b_shift
    with_sin = b_asked * a_shift - a_asked * b_shift
    return tl.where((index < wide)[:, None], with_cos, with_sin).to(a_asked.dtype)


@triton.jit
def halves(both, tile: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.split(tl.permute(tl.reshape(both, [tile, 2, wide]), (0, 2, 1)))


@triton.jit
def beside(a, b, tile: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [tile, 2 * wide])


@triton.jit(do_not_specialize=FREE)
def gather_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    mask,
    words,  # the mask, several tokens in one number
    places,
    expand,  # of late keys: their maps, constants, rates of planes, and the position of the first; or how to turn
    shift,
    rates,
    positions,
    out,
    logs,
    key_sizes,
    value_sizes,
    length,
    scaling,
    least,
    query_row,
    query_head,
    key_row,  # strides of the cache are counted in units, so that its loads are known to be aligned
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    mask_row,
    width,  # of the output
    unit: tl.constexpr,
    apart: tl.constexpr,  # whether heads are an axis of the cache, or lie side by side
    served: tl.constexpr,  # query heads of one program
    rows: tl.constexpr,
    key_sets: tl.constexpr,
    value_sets: tl.constexpr,
    key_main: tl.constexpr,
    key_rest: tl.constexpr,
    value_main: tl.constexpr,
    value_rest: tl.constexpr,
    kind: tl.constexpr,  # of the mask: 0 none, 1 boolean, 2 added
    word: tl.constexpr,
    chosen: tl.constexpr,
    turned: tl.constexpr,
    alone: tl.constexpr,
    tile: tl.constexpr,
    late: tl.constexpr,  # heads whose keys are made of what is kept of them together; 0: keys are as they are met
    size: tl.constexpr,  # of such a head
    planes: tl.constexpr,
    wide: tl.constexpr,
    still: tl.constexpr,  # whether it has more than planes
):
    """One part of the tokens, for all query heads that share keys or values: their softmax and what it gathers.

    The keys of all heads of a group are one block of columns, in which each query is zero outside its own.
    """
    part = tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, rows)
    inside = row < served
    head = group * served + row
    own_key = head // (served // key_sets)
    own_value = head // (served // value_sets)
    queries = query + batch * query_row + head * query_head
    if late > 0:
        before, kept = place(group, key_sizes)
        maps = expand + before * late * size
        member = tl.where(inside, row // (served // late), late)
        spot, there = turned_places(places, planes, wide)
        asked = asked_of(queries, spot, there, member, late)
        asked_one = asked_constant(queries, shift + (group * late + member) * size, places, inside, planes, wide)
        maps_main = expansions(maps, spot, there, kept, late, size, 0, key_main)
        if key_rest > 0:
            maps_rest = expansions(maps, spot, there, kept, late, size, key_main, key_rest)
        queries += size  # behind the planes lies what meets what is not turned
    if late == 0 or still:
        shares: tl.constexpr = served // key_sets
        rest = (queries, places, expand, inside, own_key, row % shares, group, key_sets, shares, key_sizes)
        q_main = columns_of(*rest, 0, key_main, chosen, turned)
        if key_rest > 0:
            q_rest = columns_of(*rest, key_main, key_rest, chosen, turned)

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

    key_start, key_size = block(group, key_sets, key_sizes, key_head, unit, apart)
    value_start, value_size = block(group, value_sets, value_sizes, value_head, unit, apart)
    all_keys = key + batch * key_row * unit + key_start
    all_values = value + batch * value_row * unit + value_start
    top = tl.full([rows], FAR, tl.float32)
    total = tl.zeros([rows], tl.float32)
    main = tl.zeros([rows, value_main], tl.float32)
    if value_rest > 0:
        rest = tl.zeros([rows, value_rest], tl.float32)
    if late > 0:  # turned from tile to tile
        plane = tl.arange(0, wide)
        rate = tl.load(rates + plane, mask=plane < planes, other=0.0)[None, :]
        position = (tl.load(positions + batch) + begin + tl.arange(0, tile)).to(tl.float32)[:, None]
        cos = tl.cos(position * rate)
        sin = tl.sin(position * rate)
        step_cos = tl.cos(tile * rate)
        step_sin = tl.sin(tile * rate)
    if kind > 0:  # the mask of a tile is loaded while the one before is at work
        token = begin + tl.arange(0, tile)
        ahead = tl.load(masks + token, mask=token < end, other=0)
    for at in range(begin, end, tile):
        token = at + tl.arange(0, tile)
        here = token < end
        keys = all_keys + tl.cast(at, tl.int64) * key_token * unit
        k = tile_of(keys, key_token * unit, key_size, here, 0, key_main, tile)
        if key_rest > 0:
            k_rest = tile_of(keys, key_token * unit, key_size, here, key_main, key_rest, tile)
        if late > 0:
            met = tl.dot(beside(cos, sin, tile, wide).to(k.dtype), asked_one, input_precision="ieee")
            if still:
                met = tl.dot(k, tl.trans(q_main), met, input_precision="ieee")
                if key_rest > 0:
                    met = tl.dot(k_rest, tl.trans(q_rest), met, input_precision="ieee")
            for i in tl.static_range(late):
                both = tl.dot(k, maps_main[i], input_precision="ieee")
                if key_rest > 0:
                    both = tl.dot(k_rest, maps_rest[i], both, input_precision="ieee")
                a, b = halves(both, tile, wide)
                both = beside(a * cos - b * sin, a * sin + b * cos, tile, wide)
                met = tl.dot(both.to(k.dtype), asked[i], met, input_precision="ieee")
            further = cos * step_cos - sin * step_sin
            sin = cos * step_sin + sin * step_cos
            cos = further
            scores = tl.trans(met)
        else:
            scores = tl.dot(q_main, tl.trans(k), input_precision="ieee")
            if key_rest > 0:
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores *= scaling * LOG2E
        seen = here
        if kind > 0:
            added = ahead
            ahead = tl.load(masks + token + tile, mask=token + tile < end, other=0)
            seen = here & seen_in(added, least, kind)
            if kind == 2:
                scores += added.to(tl.float32)[None, :] * LOG2E
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        rounded = weights.to(value.dtype.element_ty)
        values = all_values + tl.cast(at, tl.int64) * value_token * unit
        v = tile_of(values, value_token * unit, value_size, here, 0, value_main, tile)
        main = tl.dot(rounded, v, main * shrink[:, None], input_precision="ieee")
        if value_rest > 0:
            v_rest = tile_of(values, value_token * unit, value_size, here, value_main, value_rest, tile)
            rest = tl.dot(rounded, v_rest, rest * shrink[:, None], input_precision="ieee")

    by = 1.0 / tl.where(total > 0, total, 1.0)
    to = (batch * (tl.num_programs(1) * served) + head) * tl.num_programs(0) + part
    store(out, main * by[:, None], to, inside, own_value, group, value_sets, value_sizes, 0, width)
    if value_rest > 0:
        store(out, rest * by[:, None], to, inside, own_value, group, value_sets, value_sizes, value_main, width)
    if not alone:
        tl.store(logs + to, top + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["n", "units"])
def join_kernel(parts, logs, out, n, units, unit: tl.constexpr, many: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the parts of one row have gathered, weighted by their sums: some columns."""
    row = tl.program_id(0).to(tl.int64)
    width = units * unit  # so that loads are known to be aligned
    part = tl.arange(0, many)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    log = tl.load(logs + row * n + part, mask=part < n, other=-float("inf"))
    share = tl.exp2(log - tl.maximum(tl.max(log, 0), FAR))
    total = tl.sum(share, 0)
    share = share / tl.where(total > 0, total, 1.0)
    there = (part < n)[:, None] & (column < width)[None, :]
    found = tl.load(parts + (row * n + part[:, None]) * width + column[None, :], mask=there, other=0.0)
    joined = tl.sum(found * share[:, None], 0)
    tl.store(out + row * width + column, joined.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["batch", "heads", "first", "n", "units", "far"])
def rise_kernel(  # type: ignore[no-untyped-def]
    parts,
    logs,
    up,
    out,
    batch,
    heads,
    first,
    n,
    units,
    far,
    unit: tl.constexpr,
    size: tl.constexpr,
    alone: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
    high: tl.constexpr,
):
    """What the parts of some rows of one head have gathered, joined, and the way back from merged values.

    The numbers of a part lie far · unit from the next; units · unit of them are this head's own.
    """
    share = tl.program_id(0)
    own = units * unit  # so that loads are known to be aligned
    width = far * unit
    at = tl.program_id(1) * rows + tl.arange(0, rows)
    there = at < batch
    row = at.to(tl.int64) * heads + first + share
    top = tl.full([rows], FAR, tl.float32)
    total = tl.full([rows], 1.0, tl.float32)
    if not alone:
        for part in range(n):
            top = tl.maximum(top, tl.load(logs + row * n + part, mask=there, other=FAR))
        total = tl.zeros([rows], tl.float32)
        for part in range(n):
            total += tl.exp2(tl.load(logs + row * n + part, mask=there, other=-float("inf")) - top)
    by = 1.0 / tl.where(total > 0, total, 1.0)
    place = tl.arange(0, high)
    found = tl.zeros([rows, high], tl.float32)
    for start in range(0, own, wide):
        column = start + tl.arange(0, wide)
        inside = there[:, None] & (column < own)[None, :]
        if alone:
            joined = tl.load(parts + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        else:
            joined = tl.zeros([rows, wide], tl.float32)
            for part in range(n):
                weight = tl.exp2(tl.load(logs + row * n + part, mask=there, other=-float("inf")) - top) * by
                one = tl.load(parts + (row * n + part)[:, None] * width + column[None, :], mask=inside, other=0.0)
                joined += weight[:, None] * one
        way = tl.load(
            up + (share * size + place)[None, :] * own + column[:, None],
            mask=(column < own)[:, None] & (place < size)[None, :],
            other=0.0,
        )
        found = tl.dot(joined.to(way.dtype), way, found, input_precision="ieee")
    tl.store(
        out + row[:, None] * size + place[None, :],
        found.to(out.dtype.element_ty),
        mask=there[:, None] & (place < size)[None, :],
    )


def power(number: int) -> int:
    """The power of two that holds so many, 16 or more: less a matrix product does not take."""
    return max(16, 1 << (number - 1).bit_length())


def two_powers(width: int) -> tuple[int, int]:
    """A power of two that holds so many columns, and zero; or one, and half of it: 96 is 64 and 32.

    There are few such pairs, so that layers of different sizes share their kernels.
    """
    whole = power(width)
    main, rest = whole // 2, whole // 4
    return (main, rest) if width <= main + rest and rest >= 16 else (whole, 0)


@functools.cache
def processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program can have on one."""
    if device.type != "cuda":
        return 2, 1 << 30
    found = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count), int(getattr(found, "shared_memory_per_block_optin", 96 << 10))


class Shape:
    """Sets of keys or of values in a cache, and the groups of them that a program reads together."""

    def __init__(self, states: Tensor, sizes: Sequence[int], groups: int) -> None:
        n = len(sizes) // groups
        self.sets, self.apart = n, states.shape[1] == len(sizes) > 1
        self.blocks = [sum(sizes[i * n : (i + 1) * n]) for i in range(groups)]
        self.sizes = tuple(sizes[:1] if len(set(sizes)) == 1 else sizes)
        self.powers = two_powers(max(self.blocks))
        self.unit = math.gcd(16 // states.element_size(), *self.blocks, *states.stride()[:3])

    @property
    def fits(self) -> bool:
        """Heads that are an axis of the cache are not neighbours: each is a group of its own."""
        return self.sets == 1 or not self.apart


def shapes(key: Tensor, value: Tensor, keys: Sequence[int], values: Sequence[int]) -> tuple[int, Shape, Shape]:
    """Into how many groups query heads fall that share neither keys nor values; and what they read."""
    groups = math.gcd(len(keys), len(values))
    return groups, Shape(key, keys, groups), Shape(value, values, groups)


def evenly(programs: int, room: int, parts: int) -> int:
    """So many parts, or up to four times as many, that the last programs find nearly as much company as the first."""
    for n in range(max(1, parts), 4 * max(1, parts) + 1):
        if programs * n >= FULL * room * -(-programs * n // room):
            return n
    return parts


def planned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Sequence[int],
    values: Sequence[int],
    turning: Sequence[Tensor] = (),
) -> Plan | None:
    """A plan by the bytes of a token, the number of multiprocessors and their memory; None if nothing fits."""
    groups, k, v = shapes(key, value, keys, values)
    many, memory = processors(query.device)
    item, served = key.element_size(), query.shape[1] // groups
    size, stored = (max(k.blocks) + max(v.blocks)) * item, (sum(k.powers) + sum(v.powers)) * item
    late = len(turning) > 1
    maps = sum(k.powers) * int(turning[1][0].numel()) * item if late else 0
    programs, room = query.shape[0] * groups, PER_PROCESSOR * many
    wanted = evenly(programs, room, room // programs if late else min(2 * room // programs, max(room // programs, 2)))
    gathered = 8 * served * max(values)  # bytes of a part, written and read
    parts = max(1, min(wanted, -(-key.shape[2] // max(SHORTEST, LEAST * gathered // size))))
    least = 64 if late else 32  # rows of a matrix product
    tile = max(least, min(128, 1 << (TILE_BYTES // size).bit_length() - 1))
    warps = 4 if power(served) * sum(v.powers) <= 8192 else 8
    usual = [(t, warps, stages) for t in (tile, 64, 32) if least <= t <= tile for stages in (STAGES, 2)]
    for t, warps, stages in [(128, 8, 2)] * (maps > MANY_BYTES) + usual:
        if maps + stages * t * stored + BESIDES <= memory:
            return Plan(t, warps, stages, parts)
    return None


def gathers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Sequence[int],
    values: Sequence[int],
    turning: Sequence[Tensor] = (),
) -> bool:
    """Whether the kernel can serve these: rows without gaps, and not more than a program can hold."""
    groups, k, v = shapes(key, value, keys, values)
    dense = all(x.stride(-1) == 1 for x in (query, key, value))
    floats = query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
    small = power(query.shape[1] // groups) * max(sum(k.powers), sum(v.powers)) <= LARGEST
    fits = k.fits and v.fits and k.apart == v.apart and (k.sets == 1 or len(turning) < 2) and max(values) > 0
    return dense and floats and small and fits and planned(query, key, value, keys, values, turning) is not None


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
    turning: Sequence[Tensor],
    keys: Sequence[int],
    values: Sequence[int],
    scaling: float,
    plan: Plan,
    ups: Sequence[Tensor] = (),
) -> Tensor:
    """softmax(scaling · Q Kᵀ + mask) V of one token, (b, h, 1, largest of `values`); a row that sees nothing gives 0.

    With `ups`, (query heads, size, kept) for every set of values, what each head has gathered is multiplied by its own:
    (b, h, 1, size).

    Keys and values are (b, sets, t, size), or those of different sizes side by side in (b, 1, t, all). Every set of
    keys, and every set of values, serves as many neighbouring query heads. Late keys come with their maps (of all sets,
    flat), constants (sets, heads, size), the places and rates of planes, and the position of the first, (b, 1); behind
    the places of a query lies what meets them as they are, if they have more than planes. If `turning` is one tensor,
    it says how the planes of queries, at `places`, are turned to meet keys.
    """
    b, h, length = query.shape[0], query.shape[1], key.shape[2]
    groups, k, v = shapes(key, value, keys, values)
    unit, width, parts = math.gcd(k.unit, v.unit), max(values), plan.parts
    kind, word, least = 0, 1, 0.0
    seen = words = query
    if mask is not None:
        kind, least = (1, 0.0) if mask.dtype == torch.bool else (2, torch.finfo(mask.dtype).min)
        seen = words = mask_rows(mask, b)
        if kind == 1 and not any(x % 8 for x in (length, seen.stride(0), seen.data_ptr())):
            word, words = 8, seen.view(torch.int64)
    turned, late = len(turning) == 1, len(turning) > 1
    expand, shift, spots, rates, first = (*turning, *[query] * 5)[:5]
    planes, joined, size = (rates.numel(), *shift.shape[1:]) if late else (0, 0, 0)
    new = torch.empty if v.sets == 1 else torch.zeros
    out = new(b, h, 1, width, device=query.device, dtype=query.dtype)
    gathered, logs = out, out
    if parts > 1:
        gathered = new(b, h, parts, width, device=query.device, dtype=torch.float32)
        logs = torch.empty(b, h, parts, device=query.device, dtype=torch.float32)
    gather_kernel[(parts, groups, b)](
        query,
        key,
        value,
        seen,
        words,
        spots if places is None else places,
        expand,
        shift,
        rates,
        first,
        gathered,
        logs,
        k.sizes,
        v.sizes,
        length,
        scaling,
        least,
        query.stride(0),
        query.stride(1),
        *(x // unit for x in key.stride()[:3]),
        *(x // unit for x in value.stride()[:3]),
        seen.stride(0),
        width,
        unit=unit,
        apart=k.apart,
        served=h // groups,
        rows=power(h // groups),
        key_sets=k.sets,
        value_sets=v.sets,
        key_main=k.powers[0],
        key_rest=k.powers[1],
        value_main=v.powers[0],
        value_rest=v.powers[1],
        kind=kind,
        word=word,
        chosen=places is not None and not turned,
        turned=turned,
        alone=parts == 1,
        tile=plan.tile,
        late=joined,
        size=size,
        planes=planes,
        wide=power(planes) if late else 0,
        still=2 * planes < size,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    if ups and parts <= FEW:
        return risen(gathered, logs, ups, query.dtype)
    if parts > 1:
        wide = min(32, power(width))
        step = math.gcd(width, 4)
        grid = (b * h, -(-width // wide))
        join_kernel[grid](gathered, logs, out, parts, width // step, step, power(parts), wide, num_warps=4)
    return risen(out, out, ups, query.dtype) if ups else out


def risen(gathered: Tensor, logs: Tensor, ups: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The way back from what was gathered of merged values, (b, h, parts, width), joined where it is in parts."""
    b, h, parts, width = gathered.shape
    size, first = ups[0].shape[1], 0
    out = torch.empty(b, h, 1, size, device=gathered.device, dtype=dtype)
    for up in ups:
        shares, _, kept = up.shape
        step = math.gcd(kept, width, 8)
        rise_kernel[(shares, -(-b // ROWS))](
            gathered,
            logs,
            up,
            out,
            b,
            h,
            first,
            parts,
            kept // step,
            width // step,
            unit=step,
            size=size,
            alone=parts == 1,
            rows=ROWS,
            wide=min(128, power(kept)),
            high=power(size),
            num_warps=4,
        )
        first += shares
    return out


# Several checkpoints may each bring this file: each has an operator of its own.
@torch.library.custom_op(
    "deadweight::" + re.sub(r"\W", "_", __name__),
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? places, Tensor[] turning, int[] keys, "
    "int[] values, float scaling, Tensor[] ups) -> Tensor",
)
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Tensor | None,
    turning: Sequence[Tensor],
    keys: Sequence[int],
    values: Sequence[int],
    scaling: float,
    ups: Sequence[Tensor],
) -> Tensor:
    """`decoded` by the plan for its shapes, as one operator for torch.compile."""
    plan = planned(query, key, value, keys, values, turning)
    assert plan is not None  # `gathers` was asked
    return decoded(query, key, value, mask, places, turning, keys, values, scaling, plan, ups)


@decode.register_fake
def shape_decoded(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    values, ups = rest[4], rest[6]
    return query.new_empty(query.shape[0], query.shape[1], 1, ups[0].shape[1] if ups else max(values))
