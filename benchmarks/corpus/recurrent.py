"""Recurrent networks of torch.nn: bare, stacked, in both directions, and inside small models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corpus.entry import Entry, Made, floats, tokens


class Tagger(nn.Module):
    """A label for every token, from an LSTM that reads in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 100)
        self.lstm = nn.LSTM(100, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class CharacterModel(nn.Module):
    """The next character, from a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.gru = nn.GRU(64, 256, batch_first=True)
        self.head = nn.Linear(256, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0])


class Sentiment(nn.Module):
    """One label for a text, from the last state of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 64, padding_idx=0)
        self.rnn = nn.RNN(64, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[1][-1])


class Translator(nn.Module):
    """Sequence to sequence: an LSTM encoder, an LSTM decoder, and dot-product attention between them."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(2000, width), nn.Embedding(2000, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.score = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        read, _ = self.decoder(self.target(target), state)
        weights = torch.softmax(self.score(read) @ memory.transpose(1, 2), -1)
        return self.head(torch.tanh(self.mix(torch.cat([read, weights @ memory], -1))))


class Additive(nn.Module):
    """Bahdanau's attention: a tanh layer scores every state, one GRU cell step reads."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.GRU(64, width, bidirectional=True, batch_first=True)
        self.query, self.key = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.score = nn.Linear(width, 1)
        self.cell = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        memory, _ = self.encoder(x)
        scores = self.score(torch.tanh(self.query(state)[:, None] + self.key(memory)))
        return self.head(self.cell((torch.softmax(scores, 1) * memory).sum(1), state))


class Unrolled(nn.Module):
    """An LSTM cell in a Python loop, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(x.shape[0], 32), x.new_zeros(x.shape[0], 32))
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


def bare(kind: type[nn.Module], **options: Any) -> Made:
    return kind(32, 48, batch_first=True, **options), (floats(2, 8, 32),)


MAKERS: dict[str, Any] = {
    "LSTM": lambda: bare(nn.LSTM),
    "LSTM, stacked, both directions": lambda: bare(nn.LSTM, num_layers=2, bidirectional=True),
    "LSTM, proj_size": lambda: bare(nn.LSTM, proj_size=24),
    "GRU, stacked": lambda: bare(nn.GRU, num_layers=2),
    "RNN, both directions": lambda: bare(nn.RNN, bidirectional=True),
    "RNN, relu": lambda: bare(nn.RNN, nonlinearity="relu"),
    "LSTM tagger": lambda: (Tagger(), (tokens(5000, 12, 2),)),
    "GRU character model": lambda: (CharacterModel(), (tokens(96, 16, 2),)),
    "RNN sentiment": lambda: (Sentiment(), (tokens(5000, 12, 2),)),
    "LSTM seq2seq with attention": lambda: (Translator(), (tokens(2000, 12, 2), tokens(2000, 10, 2))),
    "GRU with additive attention": lambda: (Additive(), (floats(2, 10, 64), floats(2, 128))),
    "LSTMCell in a loop": lambda: (Unrolled(), (floats(2, 6, 16),)),
}
SMALL = {
    "LSTM, small": lambda: (nn.LSTM(3, 4, batch_first=True), (floats(8, 5, 3),)),
    "GRU, small": lambda: (nn.GRU(3, 4, batch_first=True), (floats(8, 5, 3),)),
}
ENTRIES = [
    *(Entry(f"recurrent/{name}", make) for name, make in MAKERS.items()),
    *(Entry(f"recurrent/{name}", make, complete=True) for name, make in SMALL.items()),
]
