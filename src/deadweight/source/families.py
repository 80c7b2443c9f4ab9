"""Other families of models: the names of their modules and settings, one row each, and the settings we do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from deadweight.source.type_aliases import Config
from deadweight.source.type_aliases import Setting as Value

PLAIN = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
GATED = {"silu": "swiglu", "swish": "swiglu"}
BIASED = {  # each of our biases, and the module that has it
    "query": "layers.0.attention.query",
    "key": "layers.0.attention.key",
    "value": "layers.0.attention.value",
    "output": "layers.0.attention.output",
    "gate": "layers.0.mlp.gate",
    "up": "layers.0.mlp.up",
    "down": "layers.0.mlp.down",
    "norm": "layers.0.attention_norm",
    "readout": "readout",
}
NORMED = {"query_norm": "layers.0.attention.query_norm", "key_norm": "layers.0.attention.key_norm"}


@dataclass(frozen=True)
class SourceModule:
    """The module of theirs that holds one of ours: all of it, or one of `parts` equal parts of its output rows."""

    path: str
    part: int = 0
    parts: int = 1
    transposed: bool = False  # weights are (in, out)
    first: int = 0  # the row with which ours begins

    def take(self, tensor: Tensor) -> Tensor:
        """Our part of a parameter of theirs, or of its gradient."""
        rows = tensor.T if self.transposed and tensor.ndim == 2 else tensor
        return rows.chunk(self.parts)[self.part][self.first :]


Setting = str | Callable[[Config], Value]  # the name of a field of their config, or a function of the config


@dataclass(frozen=True)
class Family:
    """One row: the classes it has in transformers, its modules by our names, and its settings."""

    base: str
    causal: str | None
    prefix: str  # of the base model's parameters in the causal model
    names: Mapping[str, SourceModule]
    settings: Mapping[str, Setting]
    fixed: Mapping[str, Value]
    activations: Mapping[str, str]
    first_position: Callable[[Config], int] = lambda config: 0  # the row of the position table for the first token
    spare: tuple[str, ...] = ()  # modules after the hidden states, which are left out
    options: Mapping[str, Value] = field(default_factory=dict)  # for from_pretrained


COMMON: dict[str, Setting] = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "init_std": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "tie_word_embeddings": "tie_word_embeddings",
}
GPT2 = Family(
    base="GPT2Model",
    causal="GPT2LMHeadModel",
    prefix="transformer.",
    names={
        "tokens": SourceModule("wte"),
        "places": SourceModule("wpe"),
        "layers.{i}.attention_norm": SourceModule("h.{i}.ln_1"),
        "layers.{i}.attention.query": SourceModule("h.{i}.attn.c_attn", 0, 3, transposed=True),
        "layers.{i}.attention.key": SourceModule("h.{i}.attn.c_attn", 1, 3, transposed=True),
        "layers.{i}.attention.value": SourceModule("h.{i}.attn.c_attn", 2, 3, transposed=True),
        "layers.{i}.attention.output": SourceModule("h.{i}.attn.c_proj", transposed=True),
        "layers.{i}.mlp_norm": SourceModule("h.{i}.ln_2"),
        "layers.{i}.mlp.up": SourceModule("h.{i}.mlp.c_fc", transposed=True),
        "layers.{i}.mlp.down": SourceModule("h.{i}.mlp.c_proj", transposed=True),
        "norm": SourceModule("ln_f"),
    },
    settings=COMMON
    | {
        "context": "max_position_embeddings",
        "hidden": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "scale": lambda config: None if config.scale_attn_weights else 1.0,
    },
    fixed={"norm": "layer", "positions": "learned"},
    activations=PLAIN,
)
LLAMA = Family(
    base="LlamaModel",
    causal="LlamaForCausalLM",
    prefix="model.",
    names={
        "tokens": SourceModule("embed_tokens"),
        "layers.{i}.attention_norm": SourceModule("layers.{i}.input_layernorm"),
        "layers.{i}.attention.query": SourceModule("layers.{i}.self_attn.q_proj"),
        "layers.{i}.attention.key": SourceModule("layers.{i}.self_attn.k_proj"),
        "layers.{i}.attention.value": SourceModule("layers.{i}.self_attn.v_proj"),
        "layers.{i}.attention.output": SourceModule("layers.{i}.self_attn.o_proj"),
        "layers.{i}.attention.query_norm": SourceModule("layers.{i}.self_attn.q_norm"),
        "layers.{i}.attention.key_norm": SourceModule("layers.{i}.self_attn.k_norm"),
        "layers.{i}.mlp_norm": SourceModule("layers.{i}.post_attention_layernorm"),
        "layers.{i}.mlp.gate": SourceModule("layers.{i}.mlp.gate_proj"),
        "layers.{i}.mlp.up": SourceModule("layers.{i}.mlp.up_proj"),
        "layers.{i}.mlp.down": SourceModule("layers.{i}.mlp.down_proj"),
        "norm": SourceModule("norm"),
    },
    settings=COMMON
    | {
        "context": "max_position_embeddings",
        "key_heads": "num_key_value_heads",
        "d_qk": lambda config: getattr(config, "head_dim", None),
        "hidden": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "rotary_base": lambda config: rope(config, "rope_theta", 10000.0),
    },
    fixed={"norm": "rms", "positions": "rotary"},
    activations=GATED,
)
BERT = Family(
    base="BertModel",
    causal=None,
    prefix="",
    names={
        "tokens": SourceModule("embeddings.word_embeddings"),
        "places": SourceModule("embeddings.position_embeddings"),
        "types": SourceModule("embeddings.token_type_embeddings"),
        "embedding_norm": SourceModule("embeddings.LayerNorm"),
        "layers.{i}.attention.query": SourceModule("encoder.layer.{i}.attention.self.query"),
        "layers.{i}.attention.key": SourceModule("encoder.layer.{i}.attention.self.key"),
        "layers.{i}.attention.value": SourceModule("encoder.layer.{i}.attention.self.value"),
        "layers.{i}.attention.output": SourceModule("encoder.layer.{i}.attention.output.dense"),
        "layers.{i}.attention_norm": SourceModule("encoder.layer.{i}.attention.output.LayerNorm"),
        "layers.{i}.mlp.up": SourceModule("encoder.layer.{i}.intermediate.dense"),
        "layers.{i}.mlp.down": SourceModule("encoder.layer.{i}.output.dense"),
        "layers.{i}.mlp_norm": SourceModule("encoder.layer.{i}.output.LayerNorm"),
    },
    settings=COMMON
    | {
        "context": "max_position_embeddings",
        "hidden": "intermediate_size",
        "norm_eps": "layer_norm_eps",
        "token_types": "type_vocab_size",
    },
    fixed={"norm": "layer", "norm_place": "post", "embedding_norm": True, "positions": "learned", "causal": False},
    activations=PLAIN,
    spare=("pooler.",),
    options={"add_pooling_layer": False},
)
ROBERTA = replace(  # positions count from the row after the padding row
    BERT,
    base="RobertaModel",
    settings={**BERT.settings, "context": lambda config: config.max_position_embeddings - config.pad_token_id - 1},
    first_position=lambda config: config.pad_token_id + 1,
)
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": replace(LLAMA, base="MistralModel", causal="MistralForCausalLM"),
    "qwen2": replace(LLAMA, base="Qwen2Model", causal="Qwen2ForCausalLM"),
    "qwen3": replace(LLAMA, base="Qwen3Model", causal="Qwen3ForCausalLM"),
    "bert": BERT,
    "roberta": ROBERTA,
}


@dataclass(frozen=True)
class RequiredSetting:
    """A setting for which we have only some values: how to read it, which these are, and what any other one means."""

    name: str
    read: Callable[[Config], Value]  # None where it is absent
    expected: tuple[Value, ...]
    otherwise: str


def rope(config: Config, name: str, default: Value = None) -> Value:
    return (getattr(config, "rope_parameters", None) or {}).get(name, default)


def window(config: Config) -> int | None:
    """The sliding window, where some layer has one that is shorter than the context."""
    width, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    sliding = kinds is None or any("sliding" in kind for kind in kinds)
    return width if width is not None and sliding and width < config.max_position_embeddings else None


def attribute(name: str) -> Callable[[Config], Value]:
    return lambda config: getattr(config, name, None)


REQUIRED_SETTINGS = (
    RequiredSetting("rope_type", lambda c: rope(c, "rope_type"), (None, "default"), "its rotary angles are rescaled"),
    RequiredSetting(
        "partial_rotary_factor",
        lambda c: rope(c, "partial_rotary_factor"),
        (None, 1.0),
        "only part of a head is rotary",
    ),
    RequiredSetting("sliding_window", window, (None,), "a token does not attend to its whole past"),
    RequiredSetting(
        "position_embedding_type", attribute("position_embedding_type"), (None, "absolute"), "positions are relative"
    ),
    RequiredSetting(
        "add_cross_attention", attribute("add_cross_attention"), (None, False), "it attends to a second sequence"
    ),
    RequiredSetting("is_decoder", attribute("is_decoder"), (None, False), "an encoder is run as a decoder"),
    RequiredSetting("attn_logit_softcapping", attribute("attn_logit_softcapping"), (None,), "scores are capped"),
    RequiredSetting("final_logit_softcapping", attribute("final_logit_softcapping"), (None,), "logits are capped"),
    RequiredSetting("num_experts", attribute("num_experts"), (None,), "the MLP is a mixture of experts"),
    RequiredSetting("quantization_config", attribute("quantization_config"), (None,), "its weights are quantised"),
    RequiredSetting(
        "scale_attn_by_inverse_layer_idx",
        attribute("scale_attn_by_inverse_layer_idx"),
        (None, False),
        "scores are scaled by the layer's number",
    ),
)
