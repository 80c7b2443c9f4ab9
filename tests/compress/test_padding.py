"""Padding of calibration inputs is neither measured nor judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as T

from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.padding import rows_of_one_length
from deadweight.compress.result import Compression
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError

LENGTHS = (20, 32, 32, 20, 32, 26, 32, 20, 32, 32, 26, 32)
SIDES = ["left", "right"]


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 99, (n,), generator=generator) for n in LENGTHS]


def padded(side: str, word: int = 0) -> dict[str, torch.Tensor]:
    """The tokens in rows of equal length, with padding of this word on one side."""
    ids, mask = torch.full((len(LENGTHS), 32), word), torch.zeros(len(LENGTHS), 32, dtype=torch.long)
    for row, own in enumerate(tokens()):
        place = slice(32 - len(own), None) if side == "left" else slice(0, len(own))
        ids[row, place], mask[row, place] = own, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", SIDES)
def test_groups_hold_every_token_once_and_no_padding(side: str) -> None:
    extra = torch.arange(len(LENGTHS))[:, None].expand(-1, 32)
    groups = rows_of_one_length({**padded(side), "token_type_ids": extra, "pixel_values": extra[:, :3]})
    assert [tuple(g["input_ids"].shape) for g in groups] == [(3, 20), (7, 32), (2, 26)]
    assert all(g["pixel_values"].shape[1] == 3 and "attention_mask" not in g for g in groups)
    rows = {int(kind[0]): ids for g in groups for ids, kind in zip(g["input_ids"], g["token_type_ids"], strict=True)}
    assert all(torch.equal(rows[n], own) for n, own in enumerate(tokens()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_is_coded_alike_whatever_the_padding(family: str, make: Callable) -> None:
    results = [
        compress(make(family), inputs=padded(side, word), keep_kv=0.4)
        for side, word in (("left", 0), ("right", 0), ("right", 98))
    ]
    for result in results:
        assert isinstance(result, CacheCompression) and isinstance(results[0], CacheCompression)
        assert result.caches == results[0].caches and result.point == results[0].point
        assert result.calibration_tokens == sum(LENGTHS) - result.point.judgements["held-back calibration text"].tokens
        assert result.tokens == 32


def test_rows_of_full_length_are_measured_as_without_a_mask(make: Callable) -> None:
    ids = torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(0))
    plain, masked = (
        compress(make("llama"), inputs={"input_ids": ids, **more}, keep_kv=0.4)
        for more in ({}, {"attention_mask": torch.ones_like(ids)})
    )
    assert isinstance(plain, CacheCompression) and isinstance(masked, CacheCompression)
    assert plain.caches == masked.caches and plain.point == masked.point


def test_a_decoder_behind_an_encoder_has_padding_of_its_own() -> None:
    inputs = {**padded("right"), **{f"decoder_{name}": x for name, x in padded("left").items()}}
    inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = (
        inputs["decoder_input_ids"].flip(0),
        inputs["decoder_attention_mask"].flip(0),
    )
    groups = rows_of_one_length(inputs)
    shapes = {(g["input_ids"].shape[1], g["decoder_input_ids"].shape[1]) for g in groups}
    assert shapes == {(a, b) for a, b in zip(LENGTHS, LENGTHS[::-1], strict=True)}
    assert sum(g["input_ids"].numel() for g in groups) == sum(LENGTHS)


def test_heads_are_measured_and_judged_without_padding() -> None:
    config = T.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    model = T.BertModel(config).eval()
    results = [compress(model, inputs=padded("right", word), keep_attention=0.5) for word in (0, 98)]
    for result in results:
        assert isinstance(result, Compression) and isinstance(results[0], Compression)
        assert result.judgement == results[0].judgement and result.kept == results[0].kept


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (range(10, 12), "found padding between the tokens of row 3"),
        (range(32), "found no tokens of row 3"),
    ],
)
def test_masks_with_holes_and_rows_without_tokens_are_refused(places: range, message: str, make: Callable) -> None:
    mask = torch.ones(8, 32, dtype=torch.long)
    mask[3, list(places)] = 0
    ids = torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(DeadweightError, match=message):
        compress(make("llama"), inputs={"input_ids": ids, "attention_mask": mask}, keep_kv=0.4)
