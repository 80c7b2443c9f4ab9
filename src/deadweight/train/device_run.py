"""One training run whose step needs nothing from the host.

Text, places of the windows, learning rates and losses lie on the device, and a counter there says which step it is.
On a GPU the whole step is one CUDA graph: the host launches it once per step, instead of a thousand kernels. Several
runs, each on a stream of its own, fill the gaps that one small model leaves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from deadweight.train.optimizer import make_optimizer, set_learning_rate
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerForCausalLM

WARM_UP = 3  # steps before the capture: libraries allocate their workspaces, the optimizer its state
Loss = Callable[[Tensor], Tensor]


class DeviceRun:
    """A model in training: `advance` makes one step."""

    def __init__(self, model: TransformerForCausalLM, loss: Loss, train: Train, text: Tensor) -> None:
        self.model, self.loss, self.train, self.text, device = model, loss, train, text, text.device
        self.start = {name: value.clone() for name, value in model.state_dict().items()}
        self.optimizer = make_optimizer(model, train, device)
        self.optimizer.zero_grad(set_to_none=True)  # a capture that failed leaves gradients
        self.rate = torch.zeros((), device=device)
        set_learning_rate(self.optimizer, self.rate)
        for group in self.optimizer.param_groups:
            group["capturable"] = device.type == "cuda"
        self.rates = torch.tensor([learning_rate(train, n) for n in range(train.steps)], device=device)
        self.starts = torch.from_numpy(window_starts(train, len(text), model.config.context)).to(device)
        self.offsets = torch.arange(model.config.context + 1, device=device)
        self.losses = torch.zeros(train.steps, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.constant_scale = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self) -> None:
        """Read the windows of this step, forward, backward, clip, update, write the loss."""
        places = self.starts.index_select(0, self.count).squeeze(0)
        self.rate.copy_(self.rates.index_select(0, self.count).squeeze(0))
        loss = self.loss(self.text[places[:, None] + self.offsets].long())
        loss.backward()
        if self.constant_scale:
            for name, parameter in self.model.named_parameters():
                if name.endswith("log_scale"):
                    parameter.grad = None  # the same graph as with a learned scale, but no update
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.index_copy_(0, self.count, loss.detach().float().reshape(1))
        self.count += 1

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def capture(self) -> None:
        """Make the step a CUDA graph, then go back to the start."""
        assert self.stream is not None
        self.reset()
        self.stream.wait_stream(torch.cuda.current_stream())
        with self.on_stream():
            for _ in range(min(WARM_UP, self.train.steps)):
                self.step()
        self.stream.synchronize()
        self.reset()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.step()
        torch.cuda.synchronize()

    @torch.no_grad()
    def reset(self) -> None:
        """Weights, optimizer and counter as at the start, in the same memory; no gradients."""
        self.model.load_state_dict(self.start)
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.count.zero_()
        self.losses.zero_()

    def advance(self) -> None:
        with self.on_stream():
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()

    def mean_loss(self, first: int, last: int) -> float:
        """The mean loss of these steps; waits for the device."""
        with self.on_stream():
            return float(self.losses[first:last].mean())


def window_starts(train: Train, length: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Where the windows of every step begin: the same as `data.batch` draws."""
    draw = lambda step: np.random.default_rng((train.seed, step)).integers(0, length - context, size=train.batch)  # noqa: E731
    return np.stack([draw(step) for step in range(train.steps)])


class RunLog:
    """The losses of one run at the logged steps; `diverged_at` is the first such step whose loss is not finite."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.diverged_at: int | None = None

    def add(self, step: int, loss: float, seconds: float) -> None:
        self.steps.append(step)
        self.losses.append(loss)
        self.seconds.append(seconds)
        if not math.isfinite(loss):
            self.diverged_at = step


Upkeep = Callable[[TransformerForCausalLM], None]


def train_side_by_side(runs: Sequence[DeviceRun], upkeep: Upkeep | None = None, every: int = 1) -> list[RunLog]:
    """Train runs of the same length in turns; `upkeep` changes the weights of each after every `every` steps."""
    train, logs = runs[0].train, [RunLog() for _ in runs]
    begin, last = time.perf_counter(), 0
    for number in range(train.steps):
        step, going = number + 1, [i for i, log in enumerate(logs) if log.diverged_at is None]
        for i in going:
            runs[i].advance()
            if upkeep is not None and step % every == 0:
                with runs[i].on_stream():
                    upkeep(runs[i].model)
        if step % train.log_every == 0 or step == train.steps:
            for i in going:
                logs[i].add(step, runs[i].mean_loss(last, step), time.perf_counter() - begin)
            last = step
    return logs
