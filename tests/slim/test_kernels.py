"""The kernels of a coded cache against the same attention in torch operations; they need a GPU."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from deadweight.compress.run import compress
from deadweight.slim import kernels
from deadweight.slim.coder import Coder
from deadweight.slim.format import CacheSpec, UnitRun
from deadweight.slim.kernel_operands import (
    SLOW,
    fast_fragments,
    fast_starts,
    fragments_of,
    kernel_places,
    masks_of_tokens,
    masks_of_units,
    prepare,
    rotation_table,
    slow_fragments,
    slow_terms,
    turning_of,
)
from deadweight.slim.kernel_sizes import AT_ONCE, KINDS, Sizes, Turning

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on an NVIDIA GPU")
SHAPES = {  # hidden size, heads, key heads, head dimension, share
    "one set of heads": (192, 6, 2, 64, 0.25),
    "a set for each head": (256, 16, 8, 64, 0.25),
    "an eighth": (256, 16, 8, 64, 0.125),
    "heads of 128": (256, 8, 4, 128, 0.25),
    "one query for each key": (192, 3, 3, 64, 0.5),
    "many queries for one key": (192, 12, 1, 64, 0.25),
    "sizes that fill no tile": (160, 4, 2, 80, 0.3),
}


@lru_cache(maxsize=2)
def made(shape: str) -> Any:
    hidden, heads, key_heads, size, share = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=1,  # a second one would read what the first rounds, and code it differently
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=4096,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=2.0)  # the mean of keys is larger than what varies
    ids = torch.randint(3, 99, (4, 192), generator=torch.Generator().manual_seed(1))
    return compress(model, inputs={"input_ids": ids}, keep_kv=share).module


PROMPT = 150  # tokens at once, before single ones


class Decoding:
    """A prompt at once, then token by token; with padding, positions count from the first real token."""

    def __init__(self, model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.model, self.cache, self.ids, self.mask = model, cache, ids, mask
        self.places = (mask.cumsum(1) - 1).clamp(min=0)
        self.run(cache, 0, PROMPT)

    def run(self, cache: Any, start: int, stop: int) -> torch.Tensor:
        """Logits of the last of these tokens."""
        given: dict[str, Any] = {}
        if not bool(self.mask.all()):
            given = {"attention_mask": self.mask[:, :stop], "position_ids": self.places[:, start:stop]}
        logits = self.model(self.ids[:, start:stop], past_key_values=cache, use_cache=True, **given).logits
        return logits[:, -1]

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """For every token logits by torch operations and by kernels, and the share of bytes that they code differently.

        Both start from the same cache: rounding in earlier steps does not matter.
        """
        for at in range(PROMPT, self.ids.shape[1]):
            twin = copy.deepcopy(self.cache)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("deadweight.slim.coded_attention.decodes", lambda *_: False)
                patch.setattr("deadweight.slim.cache.fitting", lambda *_: False)
                expected = self.run(twin, at, at + 1)
            logits = self.run(self.cache, at, at + 1)
            rows = [cache.layers[0].keys for cache in (twin, self.cache)]
            yield expected, logits, float((rows[0] != rows[1]).float().mean())


@needs_gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_kernels_decode_to_what_torch_operations_do(shape: str, padded: bool) -> None:
    """In float32; the kernels' products are of float16, whose rounding is 5e-4 of a logit or less.

    Sums of another order may round a coordinate to the next code: one byte in a thousand is far more than that.
    """
    model = copy.deepcopy(made(shape)).cuda()
    ids = torch.randint(3, 99, (3, 170), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :70], mask[1, :3] = 0, 0
    broken = copy.deepcopy(model)
    for layer in broken.model.layers:
        layer.self_attn.coder.key_decode.neg_()
    for make in (DynamicCache, lambda: StaticCache(config=model.config, max_cache_len=256)):
        for expected, logits, _ in Decoding(model, make(), ids, mask).steps():
            assert float((logits - expected).abs().max()) < 2e-3 * float(expected.abs().max())
        *_, (changed, _, _) = Decoding(broken, make(), ids, mask).steps()
        assert float((changed - expected).abs().max()) > 4e-3 * float(expected.abs().max()), "a changed map is noticed"
        assert max(share for *_, share in Decoding(model, make(), ids, mask).steps()) < 1e-3


@needs_gpu
@torch.no_grad()
def test_the_kernels_run_and_compile_in_one_graph() -> None:
    model = copy.deepcopy(made("a set for each head")).to("cuda", torch.bfloat16)
    used = []
    original = kernels.compiled
    kernels.compiled = lambda *args: used.append(args) or original(*args)  # type: ignore[assignment,func-returns-value]
    try:
        ids = torch.randint(3, 99, (2, 40)).cuda()
        caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
        for cache in caches:
            model(ids[:, :30], past_key_values=cache, use_cache=True)
        torch._dynamo.reset()
        step = torch.compile(model, fullgraph=True)
        plain, compiled = (
            [m(t, past_key_values=c).logits for t in ids[:, 30:].split(1, 1)]
            for m, c in zip((model, step), caches, strict=True)
        )
    finally:
        kernels.compiled = original
    assert used
    for a, b in zip(plain, compiled, strict=True):
        assert float((a - b).float().abs().max()) < 0.05 * float(a.abs().max())  # bfloat16


def test_dimensions_fill_two_halves_that_are_turned_with_each_other() -> None:
    assert kernel_places(2, 6, 4).tolist() == [0, 1, 4, -1, 2, 3, 5, -1]
    assert kernel_places(0, 3, 2).tolist() == [0, 1, 2, -1]


def test_fragments_have_every_number_where_tensor_cores_expect_it() -> None:
    """For mma.m16n8k16: lane = 4 · row + i has columns 2i, 2i + 1 in one register and 2i + 8, 2i + 9 in the next."""
    numbers = torch.arange(16 * 16, dtype=torch.float16).view(1, 16, 1, 16)  # a head, units, a field, dimensions
    lanes = fragments_of(numbers).view(torch.float16).view(2, 32, 2, 2)  # tiles of 8 dimensions, lanes, registers
    for tile in range(2):
        for lane in range(32):
            row, i = lane // 4, lane % 4
            for register in range(2):
                expected = [float(numbers[0, 2 * i + 8 * register + k, 0, 8 * tile + row]) for k in range(2)]
                assert lanes[tile, lane, register].tolist() == expected
    masks = torch.arange(16).view(1, 1, 1, 16)
    assert masks_of_tokens(masks).view(torch.int16).view(4, 2, 2)[1].tolist() == [[2, 3], [10, 11]]
    assert masks_of_units(masks).view(torch.int16).view(8, 2, 2)[3].tolist() == [[3, 3], [11, 11]]


def test_the_table_has_cosines_and_sines_of_16_tokens_by_16_pairs() -> None:
    rates = torch.linspace(0.1, 1.0, 32)
    table = rotation_table(rates, 128).view(torch.float16).view(8, 2, 2, 32, 4, 2)  # tiles groups kinds lanes registers
    angle = torch.arange(128).double()[:, None] * rates.double()
    for kind, numbers in enumerate(((angle.cos() - 1).half(), angle.sin().half())):
        for lane, register in ((0, 0), (14, 1), (14, 2), (31, 3)):
            token, pair = 16 * 5 + lane // 4 + 8 * (register % 2), 16 + 2 * (lane % 4) + 8 * (register // 2)
            expected = numbers[token, pair : pair + 2].tolist()
            assert table[5, 1, kind, lane, register].tolist() == pytest.approx(expected, abs=1e-6)


def test_maps_are_divided_into_those_of_fast_and_of_slow_pairs() -> None:
    """Two blocks of 16 units, two fields; 32 pairs, of which the second half is slow."""
    rates = torch.cat([torch.linspace(1.0, 0.1, 16), torch.full((16,), 1e-3)])
    maps = torch.arange(3 * 32 * 2 * 64).remainder(2011).add(1).half().view(3, 32, 2, 64)
    whole = turning_of(maps, rates)
    assert (whole.fast_groups, whole.half_chunk) == (1, 64)
    assert whole.fast_fragments == whole.slow_fragments == 0b1111
    maps[:, :, 0, 16:32] = maps[:, :, 0, 48:] = 0  # codes of the first field make no key of slow pairs
    maps[:, :, 1, :16] = maps[:, :, 1, 32:48] = 0
    turning = turning_of(maps, rates)
    assert (turning.fast_fragments, turning.slow_fragments) == (0b0101, 0b1010)
    fast = fast_fragments(maps, turning).view(torch.float16).view(3, 2, 2, 32, 4, 2)  # fragments tiles lanes registers
    slow = slow_fragments(maps, turning).view(torch.float16).view(3, 2, 2, 1, 32, 4, 2)  # fragments halves groups …
    for lane, register in ((0, 0), (14, 1), (27, 2), (31, 3)):
        row, i, second = lane // 4, lane % 4, 32 * (register // 2)
        units = slice(16 + 2 * i + 8 * (register % 2), 16 + 2 * i + 8 * (register % 2) + 2)
        assert fast[1, 1, 1, lane, register].tolist() == maps[1, units, 0, second + 8 + row].tolist()
        dims = slice(second + 16 + 2 * i + 8 * (register % 2), second + 16 + 2 * i + 8 * (register % 2) + 2)
        assert slow[1, 1, 1, 0, lane, register].tolist() == maps[1, 16 + 8 + row, 1, dims].tolist()


def test_what_keys_of_fast_pairs_start_from_lies_in_both_rows_of_four_lanes() -> None:
    """Three heads of 32 pairs, the first 16 of them fast: two tiles of eight, first and second dimensions apart."""
    starts = torch.arange(3 * 64).double().view(3, 64)
    lanes = fast_starts(starts, Turning(1, 64, 1, 1)).view(torch.float16).view(3, 2, 2, 4, 2, 2)
    for head, tile, half, lane in itertools.product(range(3), range(2), range(2), range(4)):
        first = 32 * half + 8 * tile + 2 * lane
        for row in range(2):
            assert lanes[head, tile, half, lane, row].tolist() == starts[head, first : first + 2].tolist()


def test_two_programs_share_a_multiprocessor_where_their_tables_fit() -> None:
    """Heads of 128 with maps of whole heads need too much shared memory: then one program has all warps."""
    for fragments, programs in ((0b01010101, 2), (0b11111111, 1)):
        slow = 0b11111111 ^ fragments if programs == 2 else fragments
        sizes = Sizes(128, 128, 64, 2, 2, 4, 1, Turning(2, 64, fragments, slow), False, KINDS[torch.bfloat16])
        assert (sizes.programs, sizes.warps, sizes.tiles) == (programs, AT_ONCE // programs, 2)
        assert sizes.shared_bytes() * programs <= 227 << 10


def test_rotary_pairs_that_share_dimensions_are_refused() -> None:
    """A GPU would read beside the keys."""
    run = (UnitRun(8, (4, 4, 4, 4)),)
    coder = Coder(CacheSpec(2, 1, 8, 8, 4, 4, 2, 2, (run,)))
    coder.pair_places.copy_(torch.arange(8))
    assert prepare(coder).turning.fast_groups == 0
    coder.pair_places[3] = -1
    with pytest.raises(ValueError, match="rotary pairs that share dimensions"):
        prepare(coder)


def test_chunks_are_shorter_where_that_leaves_fewer_fast_pairs() -> None:
    maps = torch.ones(1, 16, 1, 64).half()
    rates = torch.cat([torch.ones(16), torch.full((16,), 3e-3)])
    assert (turning_of(maps, rates).fast_groups, turning_of(maps, rates).half_chunk) == (1, 32)
    assert turning_of(maps, torch.zeros(32)).fast_groups == 0


def test_a_line_replaces_the_rotation_of_slow_pairs_within_the_rounding_of_float16() -> None:
    rates = torch.tensor([SLOW / 32, 1e-3, 0.0])
    _, _, c, k = slow_terms(rates, 64).double().T
    place = torch.arange(64).double()[:, None] - 31.5
    angle = place * rates.double()
    assert float((angle.cos() - c).abs().max()) < 1.3e-3
    assert float((angle.cos() - c).square().mean(0).sqrt().max()) < 6e-4
    assert float((angle.sin() - k * place).abs().max()) < 5e-5
