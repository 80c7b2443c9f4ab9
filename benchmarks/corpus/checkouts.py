"""Models that live in repositories and not in packages: each at a small complete shape, and at one of 10 to 30 M."""

from __future__ import annotations

from typing import Any

from corpus.entry import Entry, Made, imported, tokens

SMALL_CONTEXT, SMALL_VOCABULARY, CONTEXT, VOCABULARY = 5, 11, 64, 8000


def nano_gpt(vocabulary: int, context: int, width: int, layers: int, heads: int, **options: Any) -> Made:
    sizes = {"vocab_size": vocabulary, "block_size": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    config = imported("model:GPTConfig")(**sizes, **options)
    return imported("model:GPT")(config), (tokens(vocabulary, context, 2), tokens(vocabulary, context, 2))


def min_gpt(vocabulary: int, context: int, width: int, layers: int, heads: int) -> Made:
    kind = imported("mingpt.model:GPT")
    config = kind.get_default_config()
    config.model_type = None
    config.n_embd, config.n_layer, config.n_head = width, layers, heads
    config.vocab_size, config.block_size = vocabulary, context
    return kind(config), (tokens(vocabulary, context, 2),)


def llama2_c(vocabulary: int, context: int, width: int, layers: int, heads: int, **options: Any) -> Made:
    sizes = {"vocab_size": vocabulary, "max_seq_len": context, "dim": width, "n_layers": layers, "n_heads": heads}
    config = imported("model:ModelArgs")(**sizes, **options)
    asked = tokens(vocabulary, context, 2)
    return imported("model:Transformer")(config), (asked, asked)


def nanochat(vocabulary: int, context: int, width: int, layers: int, heads: int, **options: Any) -> Made:
    """Its constructor leaves the weights to init_weights; a small vocabulary is not padded.

    The smear gate reads the first 24 channels: a narrower model has a gate for those it has.
    """
    sizes = {"vocab_size": vocabulary, "sequence_len": context, "n_embd": width, "n_layer": layers}
    config = imported("nanochat.gpt:GPTConfig")(**sizes, n_head=heads, n_kv_head=heads, **options)
    module = imported("nanochat.gpt:GPT")(config, pad_vocab_size_to=1 if vocabulary < 64 else 64)
    if width < module.smear_gate.in_features:
        module.smear_gate = imported("nanochat.gpt:Linear")(width, 1, bias=False)
    module.init_weights()
    return module, (tokens(vocabulary, context, 2),)


def litgpt(name: str, vocabulary: int, context: int, **options: Any) -> Made:
    """A family's configuration by name, in another size."""
    sizes = {"padded_vocab_size": vocabulary, "vocab_size": vocabulary, "block_size": context}
    config = imported("litgpt.config:Config").from_name(name, **sizes, **options)
    return imported("litgpt.model:GPT")(config), (tokens(vocabulary, context, 2),)


def llm_c(vocabulary: int, context: int, width: int, layers: int, heads: int) -> Made:
    sizes = {"vocab_size": vocabulary, "block_size": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    config = imported("train_gpt2:GPTConfig")(**sizes)
    asked = tokens(vocabulary, context, 2)
    return imported("train_gpt2:GPT")(config), (asked, asked)


MAKERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "nanoGPT": (nano_gpt, {"width": 8, "layers": 2, "heads": 2}, {"width": 384, "layers": 6, "heads": 6}),
    "minGPT": (min_gpt, {"width": 8, "layers": 2, "heads": 2}, {"width": 384, "layers": 6, "heads": 6}),
    "llama2.c": (
        llama2_c,
        {"width": 8, "layers": 2, "heads": 2, "multiple_of": 4},
        {"width": 288, "layers": 6, "heads": 6, "multiple_of": 32},
    ),
    "llm.c": (llm_c, {"width": 8, "layers": 2, "heads": 2}, {"width": 384, "layers": 6, "heads": 6}),
    "nanochat": (
        nanochat,
        {"width": 16, "layers": 1, "heads": 2, "vocabulary": 19},
        {"width": 256, "layers": 4, "heads": 4},
    ),
}
SMALL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "intermediate_size": 12}
LARGE = {"n_layer": 6, "n_embd": 384, "n_head": 6, "intermediate_size": 1024}
GROUPED, ALL = {"n_query_groups": 1}, {"n_query_groups": 2}
WORDS = {"vocabulary": 41}  # a parallel block's first MLP reads single tokens: it needs more points than it has weights
LITGPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pythia-14m": (SMALL | ALL | WORDS, LARGE | {"n_query_groups": 6}),
    "Llama-3.2-1B": (SMALL | GROUPED | {"head_size": 4}, LARGE | {"n_query_groups": 2, "head_size": 64}),
    "Gemma-2b": (SMALL | GROUPED | {"head_size": 4}, LARGE | {"n_query_groups": 1, "head_size": 64}),
    "Gemma-2-2b": (SMALL | GROUPED | {"head_size": 4}, LARGE | {"n_query_groups": 2, "head_size": 64}),
    "phi-2": (SMALL | ALL | WORDS | {"rotary_percentage": 0.5}, LARGE | {"n_query_groups": 6}),
    "Qwen2.5-0.5B": (SMALL | GROUPED, LARGE | {"n_query_groups": 2}),
    "Mixtral-8x7B-v0.1": (
        SMALL | GROUPED | {"n_expert": 3, "moe_intermediate_size": 12},
        LARGE | {"n_query_groups": 2, "n_expert": 4, "moe_intermediate_size": 512},
    ),
}
FEW = {"vocabulary": SMALL_VOCABULARY, "context": SMALL_CONTEXT}
MANY = {"vocabulary": VOCABULARY, "context": CONTEXT}


def pair(checkout: str, name: str, make: Any, small: dict[str, Any], large: dict[str, Any]) -> list[Entry]:
    """The same model twice: small, with the account of completeness, and at a realistic size."""
    return [
        Entry(f"{name}, small", lambda: make(**(FEW | small)), checkout=checkout, complete=True),
        Entry(name, lambda: make(**MANY, **large), checkout=checkout),
    ]


ENTRIES = [
    *(e for n, (make, s, m) in MAKERS.items() for e in pair(n, f"checkouts/{n}", make, s, m)),
    Entry(
        "checkouts/nanoGPT, no bias",
        lambda: nano_gpt(**MANY, width=384, layers=6, heads=6, bias=False),
        checkout="nanoGPT",
    ),
    *(
        e
        for n, (s, m) in LITGPT.items()
        for e in pair("litgpt", f"checkouts/litgpt {n}", litgpt, {"name": n} | s, {"name": n} | m)
    ),
]
