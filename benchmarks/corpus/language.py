"""x-transformers: one wrapper, many kinds of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corpus.entry import Entry, Made, floats, image, imported, tokens

VOCABULARY, WIDTH, LENGTH = 4000, 256, 32
DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "decoder, rotary": {"rotary_pos_emb": True},
    "decoder, alibi": {"alibi_pos_bias": True},
    "decoder, T5 relative bias": {"rel_pos_bias": True},
    "decoder, QK norm": {"attn_qk_norm": True},
    "decoder, GLU": {"ff_glu": True, "ff_swish": True},
    "decoder, RMSNorm": {"use_rmsnorm": True},
    "decoder, LLaMA": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True, "ff_no_bias": True},
    "decoder, one key-value head": {"attn_one_kv_head": True},
    "decoder, grouped keys": {"attn_kv_heads": 2, "rotary_pos_emb": True},
    "decoder, talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "decoder, gated values": {"attn_gate_values": True},
    "decoder, memory keys": {"attn_num_mem_kv": 4},
    "decoder, post-norm": {"pre_norm": False},
    "decoder, flash": {"attn_flash": True},
    "decoder, value residual": {"add_value_residual": True},
}


def wrapped(kind: str = "Decoder", wrapper: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """A token model of x-transformers around one stack of attention layers."""
    sizes = {"dim": WIDTH, "depth": 4, "heads": 4} | options
    layers = imported(f"x_transformers:{kind}")(**sizes)
    settings = {"num_tokens": VOCABULARY, "max_seq_len": LENGTH} | (wrapper or {})
    return imported("x_transformers:TransformerWrapper")(attn_layers=layers, **settings)


def model(**options: Any) -> Made:
    return wrapped(**options), (tokens(VOCABULARY, 16),)


def masked_encoder() -> Made:
    mask = torch.arange(16)[None] < 13
    return wrapped("Encoder"), {"x": tokens(VOCABULARY, 16), "mask": mask}


class Translator(nn.Module):
    """An encoder, and a decoder that attends to it: called with two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = wrapped("Encoder", depth=2)
        self.decoder = wrapped("Decoder", depth=2, cross_attend=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, context=self.encoder(source, return_embeddings=True))


def vision() -> Made:
    layers = imported("x_transformers:Encoder")(dim=WIDTH, depth=4, heads=4)
    wrapper = imported("x_transformers:ViTransformerWrapper")
    return wrapper(image_size=224, patch_size=16, num_classes=1000, attn_layers=layers), (image(),)


def continuous() -> Made:
    layers = imported("x_transformers:Decoder")(dim=WIDTH, depth=4, heads=4)
    wrapper = imported("x_transformers:ContinuousTransformerWrapper")
    return wrapper(dim_in=32, dim_out=16, max_seq_len=LENGTH, attn_layers=layers), (floats(1, 16, 32),)


def small(**options: Any) -> Made:
    sizes = {"dim": 8, "depth": 1, "heads": 2, "attn_dim_head": 4, "rotary_emb_dim": 4}
    return wrapped(wrapper={"num_tokens": 11, "max_seq_len": 5}, **sizes, **options), (tokens(11, 5, 4),)


OTHERS: dict[str, Any] = {
    "encoder": lambda: model(kind="Encoder"),
    "encoder, mask": masked_encoder,
    "encoder and decoder, cross attention": lambda: (Translator(), (tokens(VOCABULARY, 12), tokens(VOCABULARY, 10))),
    "decoder, memory tokens": lambda: model(wrapper={"num_memory_tokens": 4}),
    "decoder, tied embedding": lambda: model(wrapper={"tie_embedding": True, "use_abs_pos_emb": False}),
    "ViT wrapper": vision,
    "continuous wrapper": continuous,
}
SMALL = {"decoder, small": {}, "decoder, LLaMA, small": DECODERS["decoder, LLaMA"]}
ENTRIES = [
    *(Entry(f"x-transformers/{n}", lambda o=o: model(**o), "x_transformers") for n, o in DECODERS.items()),
    *(Entry(f"x-transformers/{name}", make, "x_transformers") for name, make in OTHERS.items()),
    *(Entry(f"x-transformers/{n}", lambda o=o: small(**o), "x_transformers", complete=True) for n, o in SMALL.items()),
]
