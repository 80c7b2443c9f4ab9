"""One transformer for every shape: decoder or encoder, any heads per layer, with or without its Q, K, V weights.

Dimensions: b sequences, t tokens, h query heads, g key-value heads, q and v dimensions per head, d model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration import TransformerConfig
from .shape import LayerShape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
}


def make_norm(config: TransformerConfig, width: int | None = None) -> nn.Module:
    width, gain = width or config.d_model, config.norm_gain
    if config.norm == "layer":
        return nn.LayerNorm(width, config.norm_eps, elementwise_affine=gain, bias="norm" in config.biases)
    return nn.RMSNorm(width, config.norm_eps, elementwise_affine=gain) if config.norm == "rms" else nn.Identity()


def to_stream(width: int, d_model: int, bias: bool) -> nn.Linear:
    """A linear map to the residual stream. There are 2·n_layers of them, so its initial weights are smaller."""
    layer = nn.Linear(width, d_model, bias=bias)
    layer.to_stream = True  # type: ignore[assignment]
    return layer


class Attention(nn.Module):
    """softmax(scale · Q Kᵀ) V, then the output map. An identity projection is x itself, split into heads."""

    def __init__(self, config: TransformerConfig, shape: LayerShape) -> None:
        super().__init__()
        self.shape, self.is_causal, self.config = shape, config.causal, config
        self.num_key_value_groups = shape.heads // shape.key_heads
        d, biases = config.d_model, config.biases

        def projection(name: str, kind: str, width: int) -> nn.Module:
            return nn.Identity() if kind == "identity" else nn.Linear(d, width, bias=name in biases)

        self.query = projection("query", shape.query, shape.heads * shape.d_qk)
        self.key = projection("key", shape.key, shape.key_heads * shape.d_qk)
        self.value = projection("value", shape.value, shape.key_heads * shape.d_v)
        self.output = to_stream(shape.heads * shape.d_v, d, bias="output" in biases)
        self.query_norm = nn.RMSNorm(shape.d_qk, config.norm_eps) if config.query_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(shape.d_qk, config.norm_eps) if config.key_norm else nn.Identity()
        self.scale = config.scale or shape.d_qk**-0.5
        self.log_scale = nn.Parameter(torch.zeros(shape.heads)) if config.learned_scale else None

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: Cache | None,
        index: int,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """`position_ids` are those of `turn`, for whoever hooks into attention, as in the models of transformers."""
        s = self.shape
        q, k, v = self.project(x)
        q = self.query_norm(q.unflatten(-1, (s.heads, s.d_qk))).transpose(1, 2)  # b h t q
        k = self.key_norm(k.unflatten(-1, (s.key_heads, s.d_qk))).transpose(1, 2)  # b g t q
        v = v.unflatten(-1, (s.key_heads, s.d_v)).transpose(1, 2)  # b g t v
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.log_scale is not None:
            q = q * self.log_scale.exp().view(-1, 1, 1)
        q, k, v = in_autocast(q), in_autocast(k), in_autocast(v)
        if cache is not None:
            k, v = cache.update(k, v, index)
        return self.output(self.attend(q, k, v, mask).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The outputs of the heads, (b, t, h, v), by PyTorch's attention or by the implementation of the config."""
        name = self.config._attn_implementation
        if name not in (None, "eager", "sdpa"):
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, default=None)
            return attention(self, q, k, v, mask, scaling=self.scale)[0]
        if self.num_key_value_groups > 1:
            k, v = (z.repeat_interleave(self.num_key_value_groups, 1) for z in (k, v))
        causal = self.is_causal and mask is None and q.shape[2] > 1  # a single new token sees all earlier ones
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        return y.transpose(1, 2)


class MLP(nn.Module):
    """W_down σ(W_up x), or with a gate W_down (σ(W_gate x) ⊙ W_up x)."""

    def __init__(self, config: TransformerConfig, shape: LayerShape) -> None:
        super().__init__()
        d, biases = config.d_model, config.biases
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(d, shape.hidden, bias="gate" in biases) if gated else None
        self.up = nn.Linear(d, shape.hidden, bias="up" in biases)
        self.down = to_stream(shape.hidden, d, bias="down" in biases)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then the MLP, each with its norm (before it, or after the sum) and its skip connection."""

    def __init__(self, config: TransformerConfig, shape: LayerShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), Attention(config, shape)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config, shape)
        self.skips = config.attention_skip, config.mlp_skip
        self.pre = config.norm_place == "pre"

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: Cache | None,
        index: int,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        def attend(z: Tensor) -> Tensor:
            out: Tensor = self.attention(z, turn, mask, cache, index, position_ids=position_ids)
            return out

        x = self.add(x, self.attention_norm, attend, self.skips[0])
        return self.add(x, self.mlp_norm, self.mlp, self.skips[1])

    def add(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor], skip: bool) -> Tensor:
        y = function(norm(x) if self.pre else x)
        y = x + y if skip else y
        return y if self.pre else norm(y)


def in_autocast(x: Tensor) -> Tensor:
    """x in the precision of autocast, if that is on: norms and scales return float32."""
    device = x.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if enabled else x


def rotary(positions: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(−2i/size), repeated twice: rotary pair i is (i, i + size/2)."""
    step = 1.0 / base ** (torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angle = positions.unsqueeze(-1).float() * step
    angle = torch.cat([angle, angle], -1).unsqueeze(1)  # b 1 t q
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


def visible(x: Tensor, padding: Tensor | None, causal: bool, old: int, room: int = 0) -> Tensor | None:
    """Which of the old + new keys each new query of x sees, as (b or 1, 1, new, old + new). None if no mask is needed:
    causal attention among the new tokens, a single new token, or an encoder without padding.

    `room` is the number of keys of a static cache, filled or not; `old` may then be a tensor.
    """
    new, device = x.shape[1], x.device
    if padding is not None and padding.ndim == 4:  # a mask that transformers has made
        return padding
    if room:
        key, query = torch.arange(room, device=device), old + torch.arange(new, device=device)[:, None]
        if padding is None:
            return (key <= query)[None, None]
        filled = F.pad(padding.bool(), (0, room - padding.shape[1]))
        return ((key <= query) & filled[:, None, None, :]) | (key == query)
    if padding is None and (old == 0 or new == 1 or not causal):
        return None
    seen = torch.ones(1, 1, new, old + new, dtype=torch.bool, device=device)
    seen = seen.tril(old) if causal else seen
    if padding is None:
        return seen
    own = torch.eye(new, old + new, dtype=torch.bool, device=device).roll(old, -1)
    padded = seen & padding[:, None, None, :].bool()
    return padded | own  # a padded query sees itself: a row without keys would be NaN


class TransformerPreTrained(PreTrainedModel):
    """Initialisation, and the declarations that transformers asks for."""

    config_class = TransformerConfig
    base_model_prefix = "transformer"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]

    def _init_weights(self, module: nn.Module) -> None:
        """What transformers calls for every module of a new model."""
        self.initialise(module)

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Draw the initial weights of one module."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            smaller = (2 * self.config.n_layers) ** 0.5 if getattr(module, "to_stream", False) else 1.0
            std = self.config.init_std / smaller
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.reset_parameters()
        elif isinstance(module, Attention) and module.log_scale is not None:
            module.log_scale.zero_()


class TransformerModel(TransformerPreTrained):
    """Tokens to hidden states."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.places = nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None
        self.types = nn.Embedding(config.token_types, config.d_model) if config.token_types else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        shapes = config.layers[:1] if config.shared_layers else config.layers
        self.layers = nn.ModuleList(Layer(config, shape) for shape in shapes)
        self.sizes = [shape.d_qk for shape in config.layers]
        self.norm = make_norm(config) if config.norm_place == "pre" else nn.Identity()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: object,
    ) -> BaseModelOutputWithPast:
        config = self.config
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cached = config.causal and (config.use_cache if use_cache is None else use_cache) and not self.training
        if cached and past_key_values is None:
            past_key_values = DynamicCache()
        old, room = 0, 0
        if past_key_values is not None:
            old = past_key_values.get_seq_length()
            room = past_key_values.get_mask_sizes(x.shape[1], 0)[0] if past_key_values.is_compileable else 0
        if position_ids is None:
            position_ids = (old + torch.arange(x.shape[1], device=x.device)).unsqueeze(0)
        if self.places is not None:
            x = x + self.places(position_ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids)
        x = self.embedding_norm(in_autocast(x))  # the residual stream too, for half the memory traffic
        mask = visible(x, attention_mask, config.causal, old, room)
        sizes = set(self.sizes) if config.positions == "rotary" else set()
        turns = {size: rotary(position_ids, size, config.rotary_base) for size in sizes}
        for index in range(config.n_layers):
            layer = self.layers[0 if config.shared_layers else index]
            x = layer(x, turns.get(self.sizes[index]), mask, past_key_values, index, position_ids)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class TransformerWithReadout(TransformerPreTrained):
    """Hidden states to one logit per token of the vocabulary."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"readout.weight": "transformer.tokens.weight"}

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerModel(config)
        self.readout = nn.Linear(config.d_model, config.vocab_size, bias="readout" in config.biases)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.readout

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.readout = value  # type: ignore[assignment]


class TransformerForCausalLM(TransformerWithReadout, GenerationMixin):
    """The decoder: hidden states to the logits of the next token."""

    def __init__(self, config: TransformerConfig) -> None:
        if not config.causal:
            raise ValueError("found causal = False; expected a decoder, or TransformerForMaskedLM for this config")
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: object,
    ) -> CausalLMOutputWithPast:
        output = self.transformer(
            input_ids, attention_mask, position_ids, token_type_ids, past_key_values, inputs_embeds, use_cache
        )
        logits = self.readout(output.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:  # transformers' convention: labels are the inputs, and are shifted here
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)


class TransformerForMaskedLM(TransformerWithReadout):
    """The encoder: hidden states to the logits of the masked tokens."""

    def __init__(self, config: TransformerConfig) -> None:
        if config.causal:
            raise ValueError("found causal = True; expected an encoder, or TransformerForCausalLM for this config")
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **_: object,
    ) -> MaskedLMOutput:
        output = self.transformer(
            input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds=inputs_embeds, use_cache=False
        )
        logits = self.readout(output.last_hidden_state)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)
