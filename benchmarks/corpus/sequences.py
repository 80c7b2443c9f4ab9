"""Sequence models of other authors, each from a package of its own: books' code, hierarchies, recurrence, graphs."""

from __future__ import annotations

from typing import Any

from corpus.entry import Entry, Made, called, floats, imported, tokens

VOCABULARY, LENGTH = 4000, 32
TOKENS = {"num_tokens": VOCABULARY, "dim": 256, "depth": 2, "heads": 4, "dim_head": 64}
ASKED = tokens(VOCABULARY, LENGTH, 2)
BOOK = {"vocab_size": VOCABULARY, "context_length": 64, "emb_dim": 256, "n_heads": 4, "n_layers": 2}


def bert() -> Made:
    body = imported("bert_pytorch.model:BERT")(VOCABULARY, hidden=256, n_layers=2, attn_heads=4)
    return imported("bert_pytorch.model:BERTLM")(body, VOCABULARY), (ASKED, tokens(3, LENGTH, 2))


def book_gpt() -> Made:
    config = BOOK | {"drop_rate": 0.1, "qkv_bias": False}
    return imported("llms_from_scratch.ch04:GPTModel")(config), (ASKED,)


def book_llama() -> Made:
    import torch

    rotary = {"rope_base": 500_000.0, "rope_freq": None, "dtype": torch.float32}
    config = BOOK | rotary | {"hidden_dim": 512, "n_kv_groups": 2}
    return imported("llms_from_scratch.llama3:Llama3Model")(config), (ASKED,)


def foundation(place: str, config: str, **sizes: Any) -> Made:
    module, _, name = place.partition(":")
    settings = {"src_vocab_size": VOCABULARY, "emb_dim": 256, "nheads": 4, "nlayers": 2} | sizes
    return imported(f"{module}:{name}")(imported(f"{module}:{config}")(**settings)), (ASKED,)


def by_tokens(package: str, kind: str, **options: Any) -> Entry:
    settings = {name: value for name, value in (TOKENS | options).items() if value is not None}
    return Entry(f"sequences/{kind}", called(f"{package}:{kind}", ASKED, **settings), package)


ENTRIES = [
    Entry("sequences/BERT-pytorch", bert, "bert_pytorch"),
    Entry("sequences/LLMs from scratch, GPT", book_gpt, "llms_from_scratch"),
    Entry("sequences/LLMs from scratch, Llama 3", book_llama, "llms_from_scratch"),
    Entry(
        "sequences/foundation model stack, LLaMA",
        lambda: foundation("fms.models.llama:LLaMA", "LLaMAConfig", kvheads=2, max_expected_seq_len=64),
        "fms",
    ),
    Entry(
        "sequences/foundation model stack, RoBERTa",
        lambda: foundation("fms.models.roberta:RoBERTa", "RoBERTaConfig", max_pos=64, pad_id=1),
        "fms",
    ),
    by_tokens("h_transformer_1d", "HTransformer1D", max_seq_len=LENGTH, block_size=8, causal=True),
    by_tokens("block_recurrent_transformer_pytorch", "BlockRecurrentTransformer", max_seq_len=64, block_width=16),
    by_tokens(
        "hourglass_transformer_pytorch", "HourglassTransformerLM", max_seq_len=32, depth=(1, 1, 1), shorten_factor=2
    ),
    by_tokens("MEGABYTE_pytorch", "MEGABYTE", dim=(64, 64), depth=(1, 1), max_seq_len=(8, 4)),
    by_tokens("sinkhorn_transformer", "SinkhornTransformerLM", dim_head=None, max_seq_len=LENGTH, bucket_size=8),
    by_tokens("gateloop_transformer", "Transformer"),
    Entry(
        "sequences/GraphTransformer",
        called(
            "graph_transformer_pytorch:GraphTransformer",
            floats(2, 6, 256),
            floats(2, 6, 6, 16),
            dim=256,
            depth=2,
            edge_dim=16,
            with_feedforwards=True,
        ),
        "graph_transformer_pytorch",
    ),
    Entry(
        "sequences/iTransformer",
        called(
            "iTransformer:iTransformer",
            floats(4, 24, 7),
            num_variates=7,
            lookback_len=24,
            pred_length=(12,),
            dim=256,
            depth=2,
        ),
        "iTransformer",
    ),
]
