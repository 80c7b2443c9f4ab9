"""Packed heads: attention on what is kept is attention on whole heads with zeros in the other dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deadweight.slim.attention import AttentionOptions, attend, options_of
from deadweight.slim.format import HeadsSpec
from deadweight.slim.heads import HeadPacking, packed_attention

SPECS = {
    "all alike": HeadsSpec(4, 2, 6, 8, keys=(4, 4), values=(3, 3)),
    "one key head": HeadsSpec(4, 1, 6, 8, keys=(2,), values=(5,), listed=True),
    "keys that differ": HeadsSpec(6, 3, 6, 8, keys=(4, 4, 2), values=(3, 3, 3), listed=True),
    "values that differ": HeadsSpec(3, 3, 6, 8, keys=(6, 6, 6), values=(3, 8, 3)),
    "whole": HeadsSpec(4, 2, 6, 8, keys=(6, 6), values=(8, 8)),
}


def packing_of(spec: HeadsSpec) -> tuple[HeadPacking, Tensor, Tensor]:
    """A packing, and the dimensions that it keeps of keys and of values, (g, d)."""
    packing = HeadPacking(spec)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.zeros(spec.key_heads, spec.d_qk), torch.zeros(spec.key_heads, spec.d_v)
    listed = []
    for g in range(spec.key_heads):
        drawn = torch.randperm(spec.d_qk, generator=generator)[: spec.keys[g]].sort().values
        dimensions = drawn if spec.listed else torch.arange(spec.keys[g])
        keys[g, dimensions], values[g, : spec.values[g]] = 1.0, 1.0
        listed.append(dimensions)
    if spec.listed:
        packing.key_dimensions.copy_(torch.cat(listed))
    return packing, keys, values


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", SPECS)
def test_packed_heads_attend_as_whole_ones_with_zeros_do(name: str, tokens: int) -> None:
    spec = SPECS[name]
    packing, kept_keys, kept_values = packing_of(spec)
    generator = torch.Generator().manual_seed(1)
    groups = spec.heads // spec.key_heads
    query = torch.randn(2, spec.heads, tokens, spec.d_qk, dtype=torch.float64, generator=generator)
    key = torch.randn(2, spec.key_heads, 5, spec.d_qk, dtype=torch.float64, generator=generator)
    value = torch.randn(2, spec.key_heads, 5, spec.d_v, dtype=torch.float64, generator=generator)
    query = query * kept_keys.double().repeat_interleave(groups, 0)[:, None]
    key, value = key * kept_keys.double()[:, None], value * kept_values.double()[:, None]
    options = AttentionOptions(scaling=0.3, causal=tokens > 1)
    packed = packing.pack(key, value)
    assert packing.is_packed(*packed) and packing.is_packed(key, value) == (name == "whole")
    assert packed[0].numel() == 2 * 5 * sum(spec.keys) and packed[1].numel() == 2 * 5 * sum(spec.values)
    whole = attend(query, key, value, options)
    torch.testing.assert_close(packing.attend(query, *packed, options), whole, rtol=1e-12, atol=1e-12)
    key[:, 0, 0, int(kept_keys[0].argmax())] += 1.0  # the neighbour: a kept dimension does matter
    assert not torch.allclose(packing.attend(query, *packing.pack(key, value), options), whole)


def test_options_are_those_of_the_call_and_unknown_ones_are_refused() -> None:
    query, module = torch.zeros(1, 2, 4, 8), torch.nn.Module()
    options = options_of(module, query, None, {"scaling": 0.5, "softcap": 3.0, "dropout": 0.0, "use_cache": True})
    assert options == AttentionOptions(None, scaling=0.5, causal=True, dropout=0.0, softcap=3.0)
    with pytest.raises(NotImplementedError, match="attention with indices"):
        options_of(module, query, None, {"indices": torch.zeros(2)})


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
def test_a_position_bias_is_added_to_what_the_mask_shows(kind: str) -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    bias, seen = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(3)), torch.ones(4, 4).bool()
    seen = seen if kind == "none" else seen.tril()
    masks = {"bool": seen[None, None], "float": torch.zeros(1, 1, 4, 4).masked_fill(~seen, -1e30)}
    given = {"position_bias": bias, "scaling": 1.0, "is_causal": kind == "causal"}
    options = options_of(torch.nn.Module(), query, masks.get(kind), given)
    expected = (query @ key.mT + bias).masked_fill(~seen, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(attend(query, key, value, options), expected)


def test_a_sink_takes_its_share_of_the_softmax_and_adds_nothing() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    sinks = torch.tensor([0.5, -1.0])
    out = attend(query, key, value, AttentionOptions(scaling=0.3, causal=True, sinks=sinks))
    more = torch.cat(
        [query @ key.mT * 0.3 + torch.full((4, 4), -torch.inf).triu(1), sinks.view(1, 2, 1, 1).expand(1, 2, 4, 1)], -1
    )
    torch.testing.assert_close(out, more.softmax(-1)[..., :-1] @ value)
    assert not torch.allclose(out, attend(query, key, value, AttentionOptions(scaling=0.3, causal=True)))


def test_compressed_heads_refuse_sinks_and_position_biases() -> None:
    states = torch.zeros(1, 2, 4, 8)
    for name in ("s_aux", "position_bias"):
        with pytest.raises(NotImplementedError, match=f"attention with {name}"):
            packed_attention(torch.nn.Module(), states, states, states, None, **{name: torch.zeros(2, 4, 4)})


def test_scores_that_are_capped_are_not_those_of_torch_and_plain_ones_are() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attend(query, key, value, AttentionOptions(causal=True)), wanted)
    loose = attend(query, key, value, AttentionOptions(causal=True, softcap=1e6))  # spelled out
    torch.testing.assert_close(loose, wanted)
    assert not torch.allclose(attend(query, key, value, AttentionOptions(causal=True, softcap=0.1)), wanted)
