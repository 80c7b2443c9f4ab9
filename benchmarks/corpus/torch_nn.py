"""torch.nn's own attention and transformers, called the ways its manual shows, and small networks of its layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from corpus.entry import Entry, Made, floats, tokens

WIDTH, HEADS, LENGTH, BATCH = 256, 8, 12, 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH).expand(BATCH, LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 3]])


def sequence(width: int = WIDTH, length: int = LENGTH) -> Tensor:
    return floats(BATCH, length, width)


def encoder(width: int = WIDTH, depth: int = 4, **options: Any) -> nn.TransformerEncoder:
    settings = {"dim_feedforward": 4 * width, "batch_first": True} | options
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, width // 32, **settings), depth)


def decoder(width: int = WIDTH, depth: int = 4) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(width, width // 32, 4 * width, batch_first=True)
    return nn.TransformerDecoder(layer, depth, norm=nn.LayerNorm(width))


def masked_encoder() -> Made:
    return encoder(), {"src": sequence(), "mask": CAUSAL, "src_key_padding_mask": PADDING}


def encoder_with_float_mask() -> Made:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return encoder(), {"src": sequence(), "mask": mask, "is_causal": True}


def masked_decoder() -> Made:
    masks = {"tgt_mask": CAUSAL, "memory_key_padding_mask": PADDING}
    return decoder(), {"tgt": sequence(), "memory": sequence(), **masks}


def masked_decoder_layer() -> Made:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
    return layer, {"tgt": sequence(), "memory": sequence(), "tgt_mask": CAUSAL}


def whole_transformer(width: int, depth: int, length: int) -> Made:
    module = nn.Transformer(width, 4, depth, depth, 2 * width, batch_first=True)
    return module, (floats(BATCH, length, width), floats(BATCH, length - 2, width))


def attention(**options: Any) -> Made:
    x = sequence()
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options), (x, x, x)


def cross_attention() -> Made:
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=192, vdim=128, batch_first=True)
    return module, (sequence(), sequence(192), sequence(128))


def attention_to_another_sequence() -> Made:
    return nn.MultiheadAttention(WIDTH, HEADS), (floats(5, 2, WIDTH), floats(9, 2, WIDTH), floats(9, 2, WIDTH))


def padded_attention() -> Made:
    module, (x, _, _) = attention()
    return module, {"query": x, "key": x, "value": x, "key_padding_mask": PADDING, "need_weights": False}


class Language(nn.Module):
    """The language model of PyTorch's transformer tutorial: embedding, learned positions, encoder, head."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.encoder = encoder(width, depth, norm_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.encoder(self.embed(tokens) + self.positions[:length], mask=mask))


class Translator(nn.Module):
    """nn.Transformer between two vocabularies, with the masks that its manual asks for."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, depth, depth, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


def perceptron(*sizes: int) -> nn.Sequential:
    layers = [part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def normed_perceptron() -> Made:
    layers = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)), (floats(4, 64),)


class Pair(nn.Module):
    """A score of two vectors: nn.Bilinear over shared features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(64, 32)
        self.score = nn.Bilinear(32, 32, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.score(self.features(left).tanh(), self.features(right).tanh())


def autoencoder() -> Made:
    return nn.Sequential(perceptron(784, 256, 32), nn.ReLU(), perceptron(32, 256, 784), nn.Sigmoid()), (floats(4, 784),)


def linear_autoencoder() -> Made:
    return nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 12)), (floats(16, 12),)


class Bag(nn.Module):
    """PyTorch's text classifier: the mean of embeddings, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(5000, 64, mode="mean")
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def convolutional(normalise: Any, bias: bool = True) -> Made:
    widths = [(3, 32), (32, 64), (64, 64)]
    parts = [p for i, o in widths for p in (nn.Conv2d(i, o, 3, 1, 1, bias=bias), normalise(o), nn.ReLU())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), (floats(2, 3, 32, 32),)


def weight_normed() -> Made:
    norm = nn.utils.parametrizations.weight_norm
    layers = [norm(nn.Conv1d(16, 32, 3, padding=1)), nn.ReLU(), norm(nn.Conv1d(32, 32, 3, padding=1)), nn.ReLU()]
    return nn.Sequential(*layers, norm(nn.Conv1d(32, 8, 1))), (floats(2, 16, 24),)


def spectral_normed() -> Made:
    norm = nn.utils.parametrizations.spectral_norm
    layers = [norm(nn.Linear(32, 64)), nn.LeakyReLU(0.2), norm(nn.Linear(64, 1))]
    return nn.Sequential(*layers), (floats(4, 32),)


class UNet(nn.Module):
    """Two levels down, two up, with transposed convolutions and concatenated skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.down = self.convolutions(3, width), self.convolutions(width, 2 * width)
        self.middle = self.convolutions(2 * width, 4 * width)
        self.rise = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up = self.convolutions(4 * width, 2 * width)
        self.last = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.leave = nn.Sequential(self.convolutions(2 * width, width), nn.Conv2d(width, 2, 1))

    @staticmethod
    def convolutions(i: int, o: int) -> nn.Sequential:
        first = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        return nn.Sequential(
            *first, nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        pool = nn.functional.max_pool2d
        high = self.enter(x)
        low = self.down(pool(high, 2))
        x = self.up(torch.cat([low, self.rise(self.middle(pool(low, 2)))], 1))
        return self.leave(torch.cat([high, self.last(x)], 1))


MAKERS: dict[str, Any] = {
    "TransformerEncoder": lambda: (encoder(), (sequence(),)),
    "TransformerEncoder, mask and padding": masked_encoder,
    "TransformerEncoder, float mask": encoder_with_float_mask,
    "TransformerEncoder, norm first": lambda: (encoder(norm_first=True, activation="gelu"), (sequence(),)),
    "TransformerEncoder, no bias": lambda: (encoder(bias=False), (sequence(),)),
    "TransformerDecoder, masks": masked_decoder,
    "TransformerDecoderLayer, masks": masked_decoder_layer,
    "Transformer": lambda: whole_transformer(256, 3, 12),
    "Transformer translator": lambda: (Translator(4000, 256, 3), (tokens(4000, 12), tokens(4000, 10))),
    "TransformerEncoder language model": lambda: (Language(4000, 256, 4, 32), (tokens(4000, 16),)),
    "MultiheadAttention": attention,
    "MultiheadAttention, two sequences": attention_to_another_sequence,
    "MultiheadAttention, kdim and vdim": cross_attention,
    "MultiheadAttention, no bias": lambda: attention(bias=False),
    "MultiheadAttention, add_bias_kv": lambda: attention(add_bias_kv=True),
    "MultiheadAttention, add_zero_attn": lambda: attention(add_zero_attn=True),
    "MultiheadAttention, padding": padded_attention,
    "MLP": lambda: (perceptron(64, 256, 256, 10), (floats(4, 64),)),
    "MLP with norms": normed_perceptron,
    "Bilinear": lambda: (Pair(), (floats(4, 64), floats(4, 64))),
    "autoencoder": autoencoder,
    "EmbeddingBag classifier": lambda: (Bag(), (tokens(5000, 12, 4),)),
    "convnet, BatchNorm": lambda: convolutional(nn.BatchNorm2d),
    "convnet, GroupNorm": lambda: convolutional(lambda width: nn.GroupNorm(8, width)),
    "convnet, InstanceNorm": lambda: convolutional(lambda width: nn.InstanceNorm2d(width, affine=True)),
    "convnet, weight_norm": weight_normed,
    "MLP, spectral_norm": spectral_normed,
    "U-Net": lambda: (UNet(), (floats(1, 3, 32, 32),)),
}
TRAINED = {
    "TransformerEncoder, mask and padding, training": masked_encoder,
    "convnet, BatchNorm, training": lambda: convolutional(nn.BatchNorm2d, bias=True),
}
SMALL = {
    "Transformer, small": lambda: whole_transformer(8, 1, 5),
    "linear autoencoder, small": linear_autoencoder,
    "MLP, small": lambda: (perceptron(6, 12, 12, 3), (floats(40, 6),)),
}
ENTRIES = [
    *(Entry(f"torch.nn/{name}", make) for name, make in MAKERS.items()),
    *(Entry(f"torch.nn/{name}", make, training=True) for name, make in TRAINED.items()),
    *(Entry(f"torch.nn/{name}", make, complete=True) for name, make in SMALL.items()),
]
