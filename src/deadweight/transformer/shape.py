"""The shape of the transformer: what every layer has, and what it does without.

This file needs nothing but Python, so that a mistake in a shape is reported before torch is imported. It travels with a
checkpoint beside `configuration.py` and `modeling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

CHOICES = {
    "query": ("full", "identity"),
    "key": ("full", "identity"),
    "value": ("full", "identity"),
    "norm": ("layer", "rms", "none"),
    "norm_place": ("pre", "post"),
    "positions": ("learned", "rotary", "none"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
}
BIASES = ("query", "key", "value", "output", "gate", "up", "down", "norm", "readout")
YES_OR_NO = (
    "learned_scale",
    "query_norm",
    "key_norm",
    "norm_gain",
    "embedding_norm",
    "attention_skip",
    "mlp_skip",
    "shared_layers",
    "causal",
    "tie_word_embeddings",
)
PER_LAYER = ("heads", "key_heads", "d_qk", "d_v", "hidden", "query", "key", "value")
DEEPEST = 10_000  # layers


@dataclass(frozen=True)
class LayerShape:
    """One layer: `heads` query heads on `key_heads` key-value heads, and `hidden` units in the MLP."""

    heads: int
    key_heads: int
    d_qk: int
    d_v: int
    hidden: int
    query: str
    key: str
    value: str


@dataclass(repr=False, eq=False, kw_only=True)
class TransformerShape:
    """A transformer of any shape. The fields that PER_LAYER names take one value for all layers, or a list.

    What is None is derived: heads as wide as d_model / heads, as many key heads as heads, four times as many hidden
    units as d_model (8/3 with a gate), scores divided by √d_qk.
    """

    vocab_size: int = 256
    context: int = 256
    d_model: int = 256
    n_layers: int = 4
    heads: int | list[int] = 4
    key_heads: int | list[int | None] | None = None
    d_qk: int | list[int | None] | None = None
    d_v: int | list[int | None] | None = None
    hidden: int | list[int | None] | None = None
    query: str | list[str] = "full"  # full: a weight of its own; identity: x itself
    key: str | list[str] = "full"
    value: str | list[str] = "full"
    scale: float | None = None  # the factor of the attention scores
    learned_scale: bool = False  # a trained factor per head, on top of `scale`
    query_norm: bool = False  # an RMSNorm on every query
    key_norm: bool = False
    biases: Sequence[str] = ()  # those of BIASES that the model has
    norm: str = "layer"
    norm_place: str = "pre"
    norm_gain: bool = True
    norm_eps: float = 1e-5
    embedding_norm: bool = False  # a norm right after the embeddings, as in BERT
    attention_skip: bool = True
    mlp_skip: bool = True
    shared_layers: bool = False  # one layer, used n_layers times
    positions: str = "learned"
    rotary_base: float = 10000.0
    token_types: int = 0  # rows of the token-type embedding, as in BERT; 0: there is none
    activation: str = "gelu"
    causal: bool = True  # a decoder; otherwise every token sees every other
    init_std: float = 0.02
    tie_word_embeddings: bool = True

    @property
    def num_attention_heads(self) -> int:
        return max(layer.heads for layer in self.layers)

    @property
    def num_key_value_heads(self) -> int:
        return max(layer.key_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return max(layer.d_qk for layer in self.layers)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shape of every layer, with nothing left to derive."""
        return tuple(self.layer(i) for i in range(self.n_layers))

    def layer(self, index: int) -> LayerShape:
        heads = at(self.heads, index)
        d_qk = at(self.d_qk, index) or self.d_model // heads
        return LayerShape(
            heads=heads,
            key_heads=at(self.key_heads, index) or heads,
            d_qk=d_qk,
            d_v=at(self.d_v, index) or d_qk,
            hidden=at(self.hidden, index) or default_hidden(self),
            query=at(self.query, index),
            key=at(self.key, index),
            value=at(self.value, index),
        )


def at(value: T | list[T], index: int) -> T:
    """The value of one layer."""
    return value[index] if isinstance(value, (list, tuple)) else value


def default_hidden(config: TransformerShape) -> int:
    """4·d, or with a gate the multiple of 8 next to 8/3·d, which has as many weights."""
    return 4 * config.d_model if config.activation != "swiglu" else 8 * round(config.d_model / 3)


def check(config: TransformerShape) -> None:
    """Raise ValueError for a shape that cannot be built, naming what was found, what was expected and where."""
    for name in ("vocab_size", "context", "d_model", "n_layers"):
        expect(is_size(getattr(config, name)), f"{name} = {getattr(config, name)!r}", "a whole number above zero")
    expect(config.n_layers <= DEEPEST, f"n_layers = {config.n_layers}", f"at most {DEEPEST:,}")
    for name, allowed in CHOICES.items():
        for value in each(getattr(config, name)):
            expect(value in allowed, f"{name} = {value!r}", " or ".join(allowed))
    for name in YES_OR_NO:
        expect(isinstance(getattr(config, name), bool), f"{name} = {getattr(config, name)!r}", "true or false")
    expect(isinstance(config.biases, (list, tuple)), f"biases = {config.biases!r}", "a list of names")
    for name in config.biases:
        expect(name in BIASES, f"biases with {name!r}", f"some of {', '.join(BIASES)}")
    for name in PER_LAYER:
        value = getattr(config, name)
        if isinstance(value, (list, tuple)):
            expect(len(value) == config.n_layers, f"{name} for {len(value)} layers", f"{config.n_layers} values")
        if name not in CHOICES:
            optional = name != "heads"
            for v in each(value):
                expect((optional and v is None) or is_size(v), f"{name} = {v!r}", "whole numbers above zero")
    types, scale = config.token_types, config.scale
    expect(is_size(types) or types == 0, f"token_types = {types!r}", "a whole number, or zero for none")
    expect(scale is None or 0 < scale < float("inf"), f"scale = {scale}", "a number above zero, or none for 1/√d_qk")
    expect(0 < config.rotary_base < float("inf"), f"rotary_base = {config.rotary_base}", "a number above zero")
    for name in ("norm_eps", "init_std"):
        value = getattr(config, name)
        expect(0 <= value < float("inf"), f"{name} = {value}", "a number, zero or above")
    for index, layer in enumerate(config.layers):
        check_layer(config, layer, index, divided=at(config.d_qk, index) is None)
    if config.shared_layers:
        expect(len(set(config.layers)) == 1, "shared_layers with layers of different shapes", "one shape for all")


def check_layer(config: TransformerShape, layer: LayerShape, index: int, *, divided: bool) -> None:
    where, d = f"layer {index}: ", config.d_model
    if divided:
        expect(d % layer.heads == 0, f"{where}{layer.heads} heads for d_model = {d}", "a divisor of it, or d_qk given")
    expect(
        layer.heads % layer.key_heads == 0,
        f"{where}{layer.heads} heads on {layer.key_heads} key heads",
        "a multiple of the key heads",
    )
    if config.positions == "rotary":
        expect(layer.d_qk % 2 == 0, f"{where}rotary positions with d_qk = {layer.d_qk}", "an even d_qk")
    wide = {
        "query": (layer.heads, layer.d_qk),
        "key": (layer.key_heads, layer.d_qk),
        "value": (layer.key_heads, layer.d_v),
    }
    for name, (heads, size) in wide.items():
        if getattr(layer, name) == "identity":
            grouped = f" (grouped keys: {layer.heads} query heads share {heads})" if layer.heads != heads else ""
            expect(
                heads * size == d,
                f"{where}{name} = identity with {heads} heads of {size}{grouped}",
                f"heads × size = d_model = {d}",
            )


def each(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def expect(holds: bool, found: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"found {found}; expected {expected}")
