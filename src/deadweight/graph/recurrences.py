"""The loops over time of recurrent layers, whose input is projected before, in the precision of that input.

They are differentiated, so they are plain loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Update = Callable[[Tensor, State], State]  # the gates of one time step, and the state before it


@dataclass(frozen=True)
class Loop:
    """A loop over one axis of the gates, forwards or in reverse."""

    axis: int
    reverse: bool

    def run(self, update: Update, gates: Tensor, state: State, sizes: Tensor | None) -> State:
        """The first part of the state after every time step, as one sequence; then the last state.

        With `sizes`, the sequences are packed: time step t has a row for each of the first sizes[t] sequences. In
        reverse, a sequence whose end is not reached yet stays in its initial state.
        """
        steps = gates.unbind(self.axis) if sizes is None else gates.split(sizes.tolist())
        results: dict[int, Tensor] = {}
        for t in reversed(range(len(steps))) if self.reverse else range(len(steps)):
            rows = len(steps[t])
            updated = update(steps[t], tuple(part[:rows] for part in state))
            state = tuple(torch.cat([new, old[rows:]]) for new, old in zip(updated, state, strict=True))
            results[t] = updated[0]
        outputs = [results[t] for t in range(len(steps))]
        return (torch.stack(outputs, self.axis) if sizes is None else torch.cat(outputs), *state)


class Lstm(Loop):
    def __call__(
        self, gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, first: Tensor | None, sizes: Tensor | None
    ) -> State:
        """The hidden states, the last of them, and the last cell; `first` is added to the gates of the first step."""

        def update(x: Tensor, state: State) -> State:
            hidden, cell, *rest = state
            total = sum(rest, x + F.linear(hidden, weight))
            enter, forget, new, leave = total.chunk(4, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            return (leave.sigmoid() * cell.tanh(), cell, *(torch.zeros_like(part) for part in rest))

        state = (hidden, cell) if first is None else (hidden, cell, first)
        return self.run(update, gates, state, sizes)[:3]


class Gru(Loop):
    def __call__(
        self, gates: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, sizes: Tensor | None
    ) -> State:
        """The hidden states and the last of them; `bias` is b_hn, which the reset gate multiplies."""

        def update(x: Tensor, state: State) -> State:
            (hidden,) = state
            reset, keep, new = x.chunk(3, -1)
            from_reset, from_keep, from_new = F.linear(hidden, weight).chunk(3, -1)
            from_new = from_new if bias is None else from_new + bias
            new = (new + (reset + from_reset).sigmoid() * from_new).tanh()
            return (new + (keep + from_keep).sigmoid() * (hidden - new),)

        return self.run(update, gates, (hidden,), sizes)


class Rnn(Loop):
    def activation(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, gates: Tensor, hidden: Tensor, weight: Tensor, sizes: Tensor | None) -> State:
        """h ← f(x + W_hh·h): the hidden states and the last of them."""

        def update(x: Tensor, state: State) -> State:
            return (self.activation(x + F.linear(state[0], weight)),)

        return self.run(update, gates, (hidden,), sizes)


class TanhRnn(Rnn):
    def activation(self, x: Tensor) -> Tensor:
        return x.tanh()


class ReluRnn(Rnn):
    def activation(self, x: Tensor) -> Tensor:
        return x.relu()


RECURRENT: dict[str, Callable[[int, bool], Callable[..., State]]] = {
    "recurrent.lstm": Lstm,
    "recurrent.gru": Gru,
    "recurrent.rnn_tanh": TanhRnn,
    "recurrent.rnn_relu": ReluRnn,
}


def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> State:
    """The rows of sequences sorted by length, time step by time step, and how many sequences reach each time step."""
    steps = x.transpose(0, 1) if batch_first else x
    sizes = (lengths > torch.arange(int(lengths.max())).unsqueeze(1)).sum(1)
    return torch.cat([steps[t, :rows] for t, rows in enumerate(sizes.tolist())]), sizes


def pad(rows: Tensor, sizes: Tensor, batch_first: bool, fill: float, length: int) -> State:
    """Packed sequences, padded to one length, and their own lengths."""
    count = int(sizes[0])
    steps = rows.split(sizes.tolist())
    filled = [torch.cat([step, step.new_full((count - len(step), *step.shape[1:]), fill)]) for step in steps]
    filled += [torch.full_like(filled[0], fill)] * (length - len(filled))
    return torch.stack(filled, 1 if batch_first else 0), (sizes.unsqueeze(1) > torch.arange(count)).sum(0)


PACKING: dict[str, Callable[..., State]] = {"recurrent.pack": pack, "recurrent.pad": pad}
