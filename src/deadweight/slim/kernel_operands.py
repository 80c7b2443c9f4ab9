"""The maps of a coder as the kernels read them: fragments of tensor cores, lane by lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .coder import Coder
from .kernel_sizes import Sizes, Turning, sizes_of

CODE_SCALE = 2.0**24  # a code is 2⁻²⁴ of its number, as its bits are those of a subnormal float16
KEY_SCALE = 2.0**9  # keys of fast pairs are 2⁻⁹ of what they should be: the maps have no larger numbers than 2¹⁵
SLOW = 0.06  # the largest angle by which a slow pair turns between the middle and the end of half a chunk


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
    if sorted(order.tolist()) != list(range(spec.d_qk)):
        raise ValueError("found rotary pairs that share dimensions, or have none; expected each dimension at most once")
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
    starts = -(key_masks[..., None] / 2 * keys.double()).sum((1, 2))  # key heads, 2 · half
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
        "fast_maps": fast_fragments(keys.double() * (CODE_SCALE / KEY_SCALE), turning),
        "slow_maps": slow_fragments(keys, turning),
        "slow_terms": slow_terms(rates, turning.half_chunk),
        "steps": steps_of(rates, sizes),
        "starts": fast_starts(starts / KEY_SCALE, turning),
        "table": rotation_table(rates, sizes.chunk)[:: sizes.tiles],
        "offsets": (by_block.double() / 2).flatten(1).float(),
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


def fast_starts(starts: Tensor, turning: Turning) -> Tensor:
    """What the keys of fast pairs start from, (key heads, dimensions), for both rows of four lanes each."""
    numbers = bits_of(starts).unflatten(1, (2, -1, 4, 2))[:, :, : 2 * turning.fast_groups]  # heads halves tiles lanes 2
    pair = two(numbers[..., 0], numbers[..., 1]).transpose(1, 2)  # heads tiles halves lanes
    return torch.stack([pair, pair], -1)


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
