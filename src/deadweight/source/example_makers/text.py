"""Example tokens, and inputs that go with them: types, boxes, masks, embeddings."""

from __future__ import annotations

import torch

from deadweight.source.example_makers.need import Example, Need, first, holders, setting
from deadweight.source.inputs import Span
from deadweight.source.type_aliases import Config

PLACEHOLDERS = ("image", "video", "audio", "vision", "speech", "boi", "eoi", "boa", "eoa", "img")
N_FRAMES = 2  # of a video, where the config does not say it
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")


def special_ids(config: Config) -> dict[str, tuple[int, ...]]:
    """Every token id with a meaning in the config, by its name."""
    result: dict[str, tuple[int, ...]] = {}
    for holder in holders(config):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            if "token_id" in name or "token_index" in name:
                ids = value if isinstance(value, (list, tuple)) else (value,)
                result[name] = result.get(name, ()) + tuple(i for i in ids if isinstance(i, int))
    return result


def tokens(need: Need) -> Example:
    return tokens_below(need, need.number("vocab_size", "n_vocab", default=32))


def decoder_tokens(need: Need) -> Example:
    """Tokens of the decoder, whose vocabulary may be another one."""
    own = setting(need.config, "decoder_vocab_size")
    inner = getattr(getattr(need.config, "decoder", None), "vocab_size", None)
    return tokens_below(need, int(first(own or inner or need.number("vocab_size", "n_vocab", default=32))))


def tokens_below(need: Need, n_vocab: int) -> Example:
    """Tokens of a vocabulary of this size, without those that have a special meaning."""
    length, meanings = need.length, special_ids(need.config)
    special = {i for ids in meanings.values() for i in ids}
    plain = [i for i in range(min(n_vocab, 4 * length + len(special) + 8)) if i not in special] or list(range(n_vocab))
    placeholders = {i for name, ids in meanings.items() if name.startswith(PLACEHOLDERS) for i in ids}
    avoid = tuple(sorted(i for i in placeholders if 0 <= i < n_vocab))
    ids = [plain[(3 * i + 1) % len(plain)] for i in range(length)]
    return Example(torch.tensor([ids]), Span(0, n_vocab - 1, avoid))


def tokens_of_queries(need: Need) -> Example | None:
    """Placeholders for the output of a query transformer for an image or every frame, then tokens."""
    token, n_queries = need.get("image_token_index", "video_token_index"), need.get("num_query_tokens")
    if "pixel_values" not in need.names or not isinstance(token, int) or not isinstance(n_queries, int):
        return None
    n_places = n_queries * (N_FRAMES if need.get("video_token_index") else 1)
    words = tokens(need).value[:, : max(1, need.length - n_places)]
    return Example(torch.cat([torch.full((1, n_places), token), words], dim=1))


def codebooks(need: Need) -> Example | None:
    """One row of tokens for each codebook."""
    n_books = need.get("num_codebooks")
    drawn = tokens(need)
    return Example(drawn.value.expand(int(n_books), -1).contiguous(), drawn.span) if n_books else None


def text_and_codebooks(need: Need) -> Example | None:
    """At every position a text token and one token of each codebook."""
    n_books = need.get("num_codebooks")
    if not isinstance(n_books, int):
        return None
    drawn = tokens_below(
        need, min(need.number("codebook_vocab_size", default=32), need.number("vocab_size", default=32))
    )
    return Example(drawn.value[..., None].expand(-1, -1, n_books + 1).contiguous(), drawn.span)


def channels_last(need: Need) -> Example | None:
    """Tokens of the decoder, one of each of its channels at every position."""
    decoder = getattr(need.config, "decoder_config", None)
    n_channels = getattr(decoder, "num_channels", None)
    if not isinstance(n_channels, int):
        return None
    drawn = tokens_below(need, int(getattr(decoder, "vocab_size", 32)))
    return Example(drawn.value[..., None].expand(-1, -1, n_channels).contiguous(), drawn.span)


def query_former_tokens(need: Need) -> Example:
    """Tokens of the vocabulary of a query transformer."""
    inner = getattr(need.config, "qformer_config", need.config)
    return tokens_below(need, int(getattr(inner, "vocab_size", 32)))


def token_types(need: Need) -> Example:
    n_types = need.number("type_vocab_size", default=1)
    types = sorted(i * n_types // need.length for i in range(need.length))
    return Example(torch.tensor([types]), Span(0, n_types - 1))


def ones(need: Need) -> Example:
    return Example(torch.ones(1, need.length, dtype=torch.long))


def boxes(need: Need) -> Example:
    return Example(torch.tensor([[[1, 1, 2, 2]]]).expand(1, need.length, 4).contiguous())


def float_boxes(need: Need) -> Example:
    """Corners of boxes as fractions of the page, from 0 to 1."""
    return Example(torch.tensor([[[0.1, 0.1, 0.5, 0.5]]]).expand(1, need.length, 4).contiguous(), fixed=True)


def eight_corners(need: Need) -> Example:
    """Four corners with two coordinates each."""
    corners = torch.tensor([0.1, 0.1, 0.5, 0.1, 0.5, 0.5, 0.1, 0.5])
    return Example(corners.expand(1, need.length, 8).contiguous(), fixed=True)


def embeddings(need: Need) -> Example:
    return Example(torch.randn(1, need.length, need.number(*WIDTHS, default=8)))


def cross_embeddings(need: Need) -> Example:
    """Hidden states of another model, of the width that this one expects."""
    width = need.number("encoder_hidden_size", "cross_attention_hidden_size", *WIDTHS, default=8)
    return Example(torch.randn(1, need.length, width))


def target_layer_states(need: Need) -> Example:
    """Hidden states of several layers of the model that this one assists, concatenated."""
    n_layers = len(need.get("target_layer_ids", default=(0,)))
    return Example(torch.randn(1, need.length, n_layers * need.number(*WIDTHS, default=8)))


def visual_features(need: Need) -> Example:
    return Example(torch.randn(1, need.length, need.number("visual_feat_dim", default=8)))


def visual_boxes(need: Need) -> Example:
    return Example(torch.rand(1, need.length, need.number("visual_pos_dim", default=4)), fixed=True)


def task_tokens(need: Need) -> Example:
    """A task as tokens, of the length that the model expects."""
    return Example(torch.ones(1, need.number("task_seq_len", default=need.length)))
