"""Shapes of the studies at 38 M parameters, and what each of them counts: weights, and FLOPs per byte of text."""

from __future__ import annotations

from typing import Any

from deadweight.transformer import TransformerConfig, TransformerForCausalLM
from deadweight.transformer.shape import BIASES

SIZES: dict[str, int] = {"d_model": 512, "n_layers": 12, "heads": 8, "context": 512, "vocab_size": 256}
WIDTH, LAYERS = SIZES["d_model"], SIZES["n_layers"]
MORE, TWICE_MORE, LESS = 9 * WIDTH // 2, 10 * WIDTH // 2, 7 * WIDTH // 2  # hidden units for the weights of a projection
ALL = tuple(b for b in BIASES if b not in ("gate", "readout"))
KINDS = {
    "Q": ("query",),
    "K": ("key",),
    "V": ("value",),
    "O": ("output",),
    "MLP": ("up", "down"),
    "norm": ("norm",),
}  # biases that are left out together
Heads = list[tuple[int, int]]  # number of heads and their size, layer by layer


def heads(layers: Heads) -> dict[str, Any]:
    """The fields of a config with these heads; Σ number × size is that of the full shape."""
    assert sum(n * size for n, size in layers) == WIDTH * LAYERS and len(layers) == LAYERS
    numbers, sizes = [n for n, _ in layers], [size for _, size in layers]
    return {"heads": numbers, "key_heads": numbers, "d_qk": sizes, "d_v": sizes}


def equal(number: int) -> dict[str, Any]:
    return {"heads": number}


def without(kind: str) -> dict[str, Any]:
    return {"biases": [b for b in ALL if b not in KINDS[kind]]}


THIRD = LAYERS // 3
PYRAMID = (12, 11, 11, 10, 9, 8, 8, 7, 6, 5, 5, 4)  # heads of 64
PROJECTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "identity Q": {"query": "identity"},
    "identity V": {"value": "identity"},
    "identity K": {"key": "identity"},
    "identity Q, larger MLP": {"query": "identity", "hidden": MORE},
    "identity V, larger MLP": {"value": "identity", "hidden": MORE},
    "identity K, larger MLP": {"key": "identity", "hidden": MORE},
    "identity Q and V": {"query": "identity", "value": "identity"},
    "identity Q and V, larger MLP": {"query": "identity", "value": "identity", "hidden": TWICE_MORE},
    "full, smaller MLP": {"hidden": LESS},
}
EQUAL = {f"{n} × {WIDTH // n}": equal(n) for n in (2, 4, 16, 32)}
BOUND = "the bound"  # by `deadweight allocate plan` for the profile of s3_plans.json; saturation there changes nothing
PLANS: dict[str, dict[str, Any]] = {
    BOUND: heads([(21, 24)] * 8 + [(22, 24)] * 4),
    "large heads early": heads([(4, 128)] * THIRD + [(8, 64)] * THIRD + [(16, 32)] * THIRD),
    "small heads early": heads([(16, 32)] * THIRD + [(8, 64)] * THIRD + [(4, 128)] * THIRD),
    "pyramid, wide early": heads([(n, 64) for n in PYRAMID]),
    "pyramid, wide late": heads([(n, 64) for n in reversed(PYRAMID)]),
}
BIASED = {"all biases": {"biases": list(ALL)}, **{f"all biases but {k}": without(k) for k in KINDS}}
ROTARY = {
    "rotary": {},
    **{f"rotary, {name}": made for name, made in EQUAL.items()},
    "rotary, all biases": BIASED["all biases"],
    "rotary, all biases but K": BIASED["all biases but K"],
}
POST = {"post-norm": {}, **{f"post-norm, {name}": made for name, made in BIASED.items()}}
SHAPES: dict[str, dict[str, Any]] = {
    **PROJECTIONS,
    **EQUAL,
    **PLANS,
    **BIASED,
    **{name: {**made, "positions": "rotary"} for name, made in ROTARY.items()},
    **{name: {**made, "norm_place": "post"} for name, made in POST.items()},
}
SCALED = ", scaled"  # the graph of a shape in which the attention scale is a number of its own


def config(graph: str) -> dict[str, Any]:
    shape = graph.removesuffix(SCALED)
    return {**SIZES, **SHAPES[shape], **({"learned_scale": True} if graph != shape else {})}


def counts(shape: str) -> dict[str, int]:
    """Weights, without the tables; and FLOPs of a step per token, forward and backward: 6 per weight of a matrix, the
    readout's too, and 12·d for each of the (context + 1)/2 tokens that a token sees on average, in each layer."""
    model = TransformerForCausalLM(TransformerConfig(**config(shape)))
    places = 0 if model.transformer.places is None else model.transformer.places.weight.numel()
    tables = model.transformer.tokens.weight.numel() + places
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - places
    seen = SIZES["n_layers"] * SIZES["d_model"] * (SIZES["context"] + 1) // 2
    return {"non_embedding": model.num_parameters() - tables, "flops_per_token": 6 * matrices + 12 * seen}
