"""Attention traps: where a key or value bias is dead or folds, and the neighbour where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deadweight

WIDTH, HEADS, LENGTH = 8, 2, 5
HEAD = WIDTH // HEADS


def rotate(x: Tensor, size: int) -> Tensor:
    """Rotary positions, half-split, on the first `size` of each head's coordinates."""
    turned, rest = x[..., :size], x[..., size:]
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), 10.0 ** -torch.arange(size // 2, dtype=x.dtype))
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1)


class Attention(nn.Module):
    """One attention layer; every option is one trap."""

    def __init__(self, *, kv_heads: int = HEADS, **options: object) -> None:
        super().__init__()
        self.kv_heads, self.options = kv_heads, options
        kv = kv_heads * HEAD
        if options.get("fused"):
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv), nn.Linear(WIDTH, kv)
        self.output = nn.Linear(WIDTH, WIDTH)
        if options.get("norm") == "rms":
            self.query_norm, self.key_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        if options.get("norm") == "layer":
            self.query_norm, self.key_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)
        if options.get("sink"):
            self.sink = nn.Parameter(torch.randn(HEADS))
        if options.get("gate"):
            self.gate = nn.Linear(WIDTH, WIDTH)

    def has(self, option: str) -> bool:
        return bool(self.options.get(option))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD)).transpose(-2, -3)

    def project(self, x: Tensor, memory: Tensor) -> list[Tensor]:
        if not self.has("fused"):
            return [self.heads(self.query(x)), self.heads(self.key(memory)), self.heads(self.value(memory))]
        fused = self.qkv(x)
        if self.options["fused"] == "interleaved":  # head by head: q, k, v of head 0, then of head 1
            return list(fused.unflatten(-1, (HEADS, 3 * HEAD)).transpose(-2, -3).chunk(3, -1))
        return [self.heads(part) for part in fused.chunk(3, -1)]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.has("norm"):
            q, k = self.query_norm(q), self.key_norm(k)
        if self.has("rotary"):
            q, k = (rotate(t, int(self.options["rotary"])) for t in (q, k))  # type: ignore[call-overload]
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
        if self.has("cap"):
            scores = 5 * torch.tanh(scores / 5)
        if self.has("alibi"):
            place = torch.arange(k.shape[-2], dtype=scores.dtype)
            scores = scores - torch.tensor([0.5, 0.25], dtype=scores.dtype).view(HEADS, 1, 1) * (place[:, None] - place)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.options.get("mask") == "fill":
            scores = scores.masked_fill(later, -math.inf)
        if self.options.get("mask") == "add":
            scores = scores + torch.where(later, torch.finfo(torch.float32).min, 0.0)
        return scores

    def weights(self, scores: Tensor) -> Tensor:
        if self.has("sigmoid"):
            return torch.sigmoid(scores)
        if self.has("sink"):
            extra = self.sink.view(HEADS, 1, 1).expand(*scores.shape[:-1], 1)
            return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
        weights = torch.softmax(scores, -1)
        return F.dropout(weights, 0.3, self.training) if self.has("dropout") else weights

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, x if memory is None else memory)
        k, v = (t.repeat_interleave(HEADS // self.kv_heads, -3) for t in (k, v))
        mixed = (self.weights(self.scores(q, k)) @ v).transpose(-2, -3).flatten(-2)
        if self.has("gate"):
            mixed = mixed * torch.sigmoid(self.gate(x))
        out = self.output(mixed)
        return out + self.key(x) if self.has("echo") else out


@pytest.fixture
def stream() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH)


PLAIN = [{}, {"alibi": True}, {"mask": "fill"}, {"mask": "add"}, {"mask": "fill", "alibi": True}]


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_key_bias_is_dead_and_value_bias_folds(examine: Callable, stream: Tensor, options: dict) -> None:
    told = examine(Attention(**options), stream)
    assert told.dead("key.bias") and not told.dead("query.bias") and not told.dead("value.bias")
    (value,) = told.found("DW003", "value.bias")
    assert (value.slice, value.dof, value.into) == (None, WIDTH, ("output.bias",))
    assert told.dof("DW009") == told.dof("DW010") == HEADS * HEAD**2


BLOCKED = [
    ({"rotary": HEAD}, "softmax", "rotary"),
    ({"norm": "rms"}, "core.rms", "RMSNorm subtracts no mean"),
    ({"cap": True}, "aten.tanh", "soft-cap"),
    ({"sink": True}, "softmax", "sink"),
    ({"sigmoid": True}, "aten.sigmoid", "sigmoid does not ignore"),
]


@pytest.mark.parametrize(("options", "operation", "reason"), BLOCKED)
def test_an_operation_blocks_the_key_bias_and_is_named(
    examine: Callable, stream: Tensor, options: dict, operation: str, reason: str
) -> None:
    told = examine(Attention(**options), stream)
    assert not told.laws_of("key.bias") & {"DW002", "DW018"}
    assert operation in told.blockers("key.bias")
    assert reason in told.reasons("key.bias")


@pytest.mark.parametrize("options", [{"rotary": HEAD}, {"norm": "rms"}, {"cap": True}], ids=str)
def test_what_blocks_the_key_bias_does_not_block_the_value_bias(
    examine: Callable, stream: Tensor, options: dict
) -> None:
    assert examine(Attention(**options), stream).found("DW003", "value.bias")


@pytest.mark.parametrize("options", [{"sink": True}, {"sigmoid": True}], ids=str)
def test_weights_that_do_not_sum_to_one_keep_the_value_bias(examine: Callable, stream: Tensor, options: dict) -> None:
    assert not examine(Attention(**options), stream).found("DW003", "value.bias")


def test_only_the_unrotated_part_of_a_partly_rotated_key_bias_is_dead(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(rotary=HEAD // 2), stream)
    assert told.pieces("DW002", "key.bias") == [(2, 4), (6, 8)]
    assert told.dof("DW002") == 4 and "rotary" in told.reasons("key.bias")


@pytest.mark.parametrize(("size", "per_head"), [(0, HEAD**2), (HEAD, 4), (HEAD // 2, 2 + 4)])
def test_rotary_leaves_two_dimensions_per_plane_of_the_query_key_basis(
    examine: Callable, stream: Tensor, size: int, per_head: int
) -> None:
    assert examine(Attention(rotary=size), stream).dof("DW009") == HEADS * per_head


def test_the_shift_of_a_norm_on_the_keys_is_itself_a_key_bias(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(norm="layer"), stream)
    assert told.dead("key_norm.bias") and not told.dead("query_norm.bias") and not told.dead("key.bias")


def test_a_per_head_layernorm_leaves_the_mean_of_each_head_of_the_key_bias_dead(
    examine: Callable, stream: Tensor
) -> None:
    told = examine(Attention(norm="layer"), stream)
    assert sum(f.dof for f in told.audit.findings if f.parameter == "key.bias" and f.verdict == "dead") == HEADS


def test_cross_attention_has_a_dead_key_bias(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(), stream, torch.randn(2, 7, WIDTH))
    assert told.dead("key.bias") and told.found("DW003", "value.bias")


def test_grouped_keys_have_a_dead_bias_and_the_value_bias_folds_through_the_repeat(
    examine: Callable, stream: Tensor
) -> None:
    told = examine(Attention(kv_heads=1), stream)
    assert told.dead("key.bias")
    assert [f.dof for f in told.found("DW003", "value.bias")] == [HEAD]
    assert told.dof("DW009") == told.dof("DW010") == HEAD**2


def test_fused_projections_fall_into_query_key_and_value(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(fused="blocks"), stream)
    assert told.pieces("DW002", "qkv.bias") == [(8, 16)]
    assert told.pieces("DW003", "qkv.bias") == [(16, 24)]


def test_interleaved_projections_fall_into_query_key_and_value_head_by_head(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(fused="interleaved"), stream)
    assert told.pieces("DW002", "qkv.bias") == [(4, 8), (16, 20)]
    assert told.pieces("DW003", "qkv.bias") == [(8, 12), (20, 24)]


def test_a_rotated_fused_key_bias_is_not_dead_but_its_value_part_folds(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(fused="blocks", rotary=HEAD), stream)
    assert not told.found("DW002", "qkv.bias") and told.pieces("DW003", "qkv.bias") == [(16, 24)]


def test_a_gate_on_the_heads_blocks_the_value_bias_and_is_named(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(gate=True), stream)
    assert told.dead("key.bias") and not told.found("DW003", "value.bias")
    assert any(u.parameter == "value.bias" and u.blocked_by for u in told.audit.unknown)


def test_a_path_that_reads_the_key_bias_a_second_time_keeps_it(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(echo=True), stream)
    assert not told.dead("key.bias") and not told.found("DW002", "key.bias")


def test_attention_dropout_in_training_keeps_the_value_bias(stream: Tensor) -> None:
    findings = deadweight.audit(Attention(dropout=True), stream, training=True).findings
    assert not [f for f in findings if f.parameter == "value.bias" and f.verdict != "gauge"]


def test_attention_dropout_is_off_in_eval(examine: Callable, stream: Tensor) -> None:
    told = examine(Attention(dropout=True), stream)
    assert told.dead("key.bias") and told.found("DW003", "value.bias")


def test_attention_dropout_in_training_leaves_the_key_bias_dead(examine: Callable, stream: Tensor) -> None:
    assert examine(Attention(dropout=True), stream, training=True).dead("key.bias")


class TorchAttention(nn.Module):
    """The library's own layer, with its options."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


def randomised(module: nn.Module) -> nn.Module:
    """MultiheadAttention starts with zero biases."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def test_torch_attention_has_a_dead_key_bias(examine: Callable, stream: Tensor) -> None:
    told = examine(randomised(TorchAttention()), stream)
    assert told.pieces("DW002", "layer.in_proj_bias") == [(8, 16)]
    assert told.pieces("DW003", "layer.in_proj_bias") == [(16, 24)]


def test_a_zero_key_beside_the_others_keeps_both_biases(examine: Callable, stream: Tensor) -> None:
    told = examine(randomised(TorchAttention(add_zero_attn=True)), stream)
    assert not told.laws_of("layer.in_proj_bias") & {"DW002", "DW003"}


def test_a_learned_key_and_value_beside_the_others_keep_both_biases(examine: Callable, stream: Tensor) -> None:
    told = examine(randomised(TorchAttention(add_bias_kv=True)), stream)
    assert not told.laws_of("layer.in_proj_bias") & {"DW002", "DW003"}


class SharedProjection(nn.Module):
    """One projection for queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.both(x), self.both(x * x)
        return self.output(torch.softmax(q @ q.mT, -1) @ self.value(x) + torch.softmax(q @ k.mT, -1) @ torch.sin(x))


def test_one_projection_for_queries_and_keys_keeps_its_bias(examine: Callable, stream: Tensor) -> None:
    told = examine(SharedProjection(), stream)
    assert not told.laws_of("both.bias") & {"DW002", "DW003"} and told.found("DW003", "value.bias")


class TwoLayers(nn.Module):
    """The same attention layer used twice."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first = Attention()
        self.second = self.first if shared else Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + torch.tanh(self.second(x))


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_layer_is_claimed_once(examine: Callable, stream: Tensor, shared: bool) -> None:
    told = examine(TwoLayers(shared=shared), stream)
    assert told.dead("first.key.bias")
    assert bool(told.found("DW002", "second.key.bias")) is not shared


class SharedBias(nn.Module):
    """One bias in two places of one sum: an absorber must take both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.left, self.right = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = (self.left(x) + self.shared) + self.other
        return torch.tanh(first + (self.right(x * x) + self.shared))


def test_a_bias_used_twice_in_one_sum_is_never_claimed_unsoundly(examine: Callable, stream: Tensor) -> None:
    assert not examine(SharedBias(), stream).dead("shared")
