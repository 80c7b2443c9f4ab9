"""One head dimension and one set of rotary pairs for all heads: smaller heads that plain transformers can load.

A LLaMA-type config holds the head dimension (`head_dim`) and, as rotary factors per pair (rope type "longrope"), any
frequencies. So the same pairs can be dropped from all heads of all layers, and as many dimensions of all values.
The weights are packed; query weights are rescaled, because the softmax scale depends on the head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.compress.judge import main_output, run_model
from deadweight.compress.linear_map import LinearMap
from deadweight.compress.locate import Heads, Rows
from deadweight.compress.rotary_pairs import PairSpace, best_pairs
from deadweight.compress.streaming import device_of, float_of
from deadweight.compress.truncate import HeadSpaces, KeptDimensions

CLOSE = 1e-3  # of the largest logit: packed and padded weights are the same function, up to rounding


def is_expressible(config: Any, spaces: Sequence[HeadSpaces]) -> bool:
    """Whether a config of this type can describe smaller heads, and every attention has the layout it expects."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default" or "rope_theta" not in rope:
        return False
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    return whole and getattr(config, "head_dim", None) is not None and all(fits(s.heads) for s in spaces)


def fits(heads: Heads) -> bool:
    half = heads.d_qk // 2
    sides = (heads.query, heads.key, heads.value)
    in_order = all(s is not None and torch.equal(s.places.flatten(), torch.arange(s.places.numel())) for s in sides)
    halves = heads.rotary_pairs == tuple((i, i + half) for i in range(half))
    return in_order and halves and heads.d_qk == heads.d_v and heads.output is not None


def common_order(moments: Mapping[str, Tensor], spaces: Sequence[HeadSpaces]) -> tuple[int, ...]:
    """Rotary pairs by the loss of dropping each from all heads, the least first."""
    count = len(spaces[0].heads.rotary_pairs)
    cost = torch.zeros(count, dtype=torch.float64)
    for s in spaces:
        shape = (s.heads.groups, 2, count)
        blocks = moments[s.heads.path].unflatten(1, shape).unflatten(-1, shape)
        stretched = blocks[:, :, 0, :, :, 0, :].sum((1, 3))  # over query heads: g P P
        cost += stretched.diagonal(dim1=-2, dim2=-1).sum(0)
    return tuple(cost.argsort().tolist())


@dataclass(frozen=True)
class OneSize:
    """Heads of one dimension: one order of rotary pairs for all, what each attention keeps, the predicted loss."""

    size: int
    spaces: tuple[HeadSpaces, ...]
    kept: dict[str, KeptDimensions]
    loss: float

    @property
    def pairs(self) -> tuple[int, ...]:
        """The rotary pairs that all heads keep."""
        space = self.spaces[0].pairs[0]
        assert space is not None
        return space.kept(self.size // 2)


def choose_one_size(spaces: Sequence[HeadSpaces], moments: Mapping[str, Tensor], size: int) -> OneSize:
    """The best heads of one dimension; `moments` are those of rotary pairs, by attention."""
    order = common_order(moments, spaces)
    ordered, kept, loss = [], {}, 0.0
    for s in spaces:
        heads = s.heads
        pairs: tuple[PairSpace, ...] = tuple(
            best_pairs(m, heads.groups, len(heads.rotary_pairs), order) for m in moments[heads.path]
        )
        ordered.append(replace(s, pairs=pairs))
        n = heads.key_heads
        kept[heads.path] = KeptDimensions((size,) * n, (0,) * n, (size // 2,) * n)
        loss += sum(float(p.loss[size // 2]) for p in pairs)
        loss += sum(float(v.loss[size]) for v in s.values if v is not None)
    return OneSize(size, tuple(ordered), kept, loss)


def pack_model(padded: Any, one: OneSize) -> tuple[nn.Module, dict[str, Any]]:
    """The padded model in a config of smaller heads, and the changes of that config."""
    changes = smaller_config(padded.config, one.pairs, one.spaces[0].heads.d_qk, one.size)
    config = copy.deepcopy(padded.config)
    for name, value in changes.items():
        setattr(config, name, value)
    module: Any = type(padded)(config).to(device_of(padded), float_of(padded))
    tensors = dict(padded.state_dict())
    for s in one.spaces:
        tensors |= pack_weights(padded, s.heads, one.pairs, one.size)
    module.load_state_dict(tensors)
    return module.eval(), changes


def smaller_config(config: Any, kept: Sequence[int], whole: int, size: int) -> dict[str, Any]:
    """Pair j of the smaller heads rotates like the j-th kept pair: 1 / (factor · base^(2j/size)) = base^(−2p/whole)."""
    base, longest = config.rope_parameters["rope_theta"], config.max_position_embeddings
    factors = [base ** (2 * p / whole - 2 * j / size) for j, p in enumerate(kept)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }
    return {"head_dim": size, "rope_parameters": rope}


def pack_weights(model: nn.Module, heads: Heads, kept: Sequence[int], size: int) -> dict[str, Tensor]:
    """The weights of one attention without the dimensions that are zero."""
    half, old = heads.d_qk // 2, heads.d_qk
    turned = torch.tensor([*kept, *(p + half for p in kept)])
    first = torch.arange(size)
    tensors: dict[str, Tensor] = {}

    def take(rows: Rows | None, places: Tensor, factor: float) -> None:
        assert rows is not None
        layer, count = LinearMap(model, rows.module), rows.places.shape[0]
        at = (torch.arange(count)[:, None] * old + places).flatten()
        tensors[f"{rows.module}.weight"] = factor * layer.weight[at]
        if layer.bias is not None:
            tensors[f"{rows.module}.bias"] = factor * layer.bias[at]

    take(heads.query, turned, (size / old) ** 0.5)
    take(heads.key, turned, 1.0)
    take(heads.value, first, 1.0)
    assert heads.output is not None
    columns = (torch.arange(heads.heads)[:, None] * old + first).flatten()
    tensors[f"{heads.output}.weight"] = LinearMap(model, heads.output).weight[:, columns]
    return tensors


@torch.no_grad()
def computes_the_same(padded: nn.Module, small: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the packed model computes what the padded one does."""
    a, _ = main_output(run_model(padded, batch))
    b, _ = main_output(run_model(small, batch))
    return float((a - b).abs().max()) <= CLOSE * float(a.abs().max())
