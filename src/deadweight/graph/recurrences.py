"""Recurrences: what a recurrent layer does once its input is projected, in the precision of its input.

They are differentiated, so they are plain loops over time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], State]


def scan(step: Step, gates: Tensor, state: State, axis: int, reverse: bool, sizes: Tensor | None) -> State:
    """The first part of the state after every step, as one sequence; then the last state.

    With `sizes`, the sequences are packed: step t has a row for each of the first sizes[t] sequences. In reverse, a
    sequence whose end has not been reached yet waits in its initial state.
    """
    steps = gates.unbind(axis) if sizes is None else gates.split(sizes.tolist())
    results: dict[int, Tensor] = {}
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        rows = len(steps[t])
        moved = step(steps[t], tuple(part[:rows] for part in state))
        state = tuple(torch.cat([new, old[rows:]]) for new, old in zip(moved, state, strict=True))
        results[t] = moved[0]
    outputs = [results[t] for t in range(len(steps))]
    return (torch.stack(outputs, axis) if sizes is None else torch.cat(outputs), *state)


def lstm(
    gates: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weight: Tensor,
    first: Tensor | None,
    axis: int,
    reverse: bool,
    sizes: Tensor | None,
) -> State:
    """The hidden states, the last of them, and the last cell; `first` is added to the gates of the first step."""

    def step(x: Tensor, state: State) -> State:
        hidden, cell, *rest = state
        total = sum(rest, x + F.linear(hidden, weight))
        enter, forget, new, leave = total.chunk(4, -1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return (leave.sigmoid() * cell.tanh(), cell, *(torch.zeros_like(part) for part in rest))

    state = (hidden, cell) if first is None else (hidden, cell, first)
    return scan(step, gates, state, axis, reverse, sizes)[:3]


def gru(
    gates: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: int,
    reverse: bool,
    sizes: Tensor | None,
) -> State:
    """The hidden states and the last of them; `bias` is b_hn, which the reset gate multiplies."""

    def step(x: Tensor, state: State) -> State:
        (hidden,) = state
        reset, update, new = x.chunk(3, -1)
        from_reset, from_update, from_new = F.linear(hidden, weight).chunk(3, -1)
        from_new = from_new if bias is None else from_new + bias
        new = (new + (reset + from_reset).sigmoid() * from_new).tanh()
        return (new + (update + from_update).sigmoid() * (hidden - new),)

    return scan(step, gates, (hidden,), axis, reverse, sizes)


def rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    """h ← f(x + W_hh·h): the hidden states and the last of them."""

    def run(gates: Tensor, hidden: Tensor, weight: Tensor, axis: int, reverse: bool, sizes: Tensor | None) -> State:
        step = lambda x, state: (activation(x + F.linear(state[0], weight)),)  # noqa: E731
        return scan(step, gates, (hidden,), axis, reverse, sizes)

    return run


RECURRENT: dict[str, Callable[..., State]] = {
    "recurrent.lstm": lstm,
    "recurrent.gru": gru,
    "recurrent.rnn_tanh": rnn(torch.tanh),
    "recurrent.rnn_relu": rnn(torch.relu),
}


def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> State:
    """The rows of sequences that are sorted by length, step by step, and how many sequences reach each step."""
    steps = x.transpose(0, 1) if batch_first else x
    sizes = (lengths > torch.arange(int(lengths.max())).unsqueeze(1)).sum(1)
    return torch.cat([steps[t, :rows] for t, rows in enumerate(sizes.tolist())]), sizes


def pad(rows: Tensor, sizes: Tensor, batch_first: bool, fill: float, length: int) -> State:
    """The sequences that were packed, filled up at their ends, and their lengths."""
    count = int(sizes[0])
    steps = rows.split(sizes.tolist())
    filled = [torch.cat([step, step.new_full((count - len(step), *step.shape[1:]), fill)]) for step in steps]
    filled += [torch.full_like(filled[0], fill)] * (length - len(filled))
    return torch.stack(filled, 1 if batch_first else 0), (sizes.unsqueeze(1) > torch.arange(count)).sum(0)


PACKING: dict[str, Callable[..., State]] = {"recurrent.pack": pack, "recurrent.pad": pad}
