"""Many training runs of one shape, one after the other: the graph is compiled once, the weights are initialised anew.

The initial weights of a module depend only on the seed and on its name. So two shapes with the same seed start with the
same weights in the modules that both have, and read the same text in the same order: their losses can be paired.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.train.data import TokenArray, TokenSplit, batch, windows
from deadweight.train.ensemble import Curve, Member
from deadweight.train.fast_gelu import with_fast_gelu
from deadweight.train.loop import make_optimizer, precision_of, set_learning_rate
from deadweight.train.objective import Objective
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM


@dataclass(frozen=True)
class TimedCurve:
    """The losses of one run, its times and its memory."""

    curve: Curve
    seconds: tuple[float, ...]  # since the start, at the steps of the curve
    tokens_per_second: float  # median over the steps of the curve
    gigabytes: float | None  # peak memory of torch on the GPU


class Repeated:
    """One shape on one device, trained as often as asked."""

    def __init__(self, config: TransformerConfig, train: Train, device: torch.device) -> None:
        self.config, self.train, self.device = config, train, device
        precision = precision_of(train, device)
        self.fresh = TransformerForCausalLM(config)
        self.model = TransformerForCausalLM(config).to(device).train()
        self.judge = Objective(TransformerForCausalLM(config).to(device).train(), precision)
        compiled = device.type == "cuda" if train.compile is None else train.compile
        if compiled and device.type == "cuda" and precision == torch.bfloat16:
            with_fast_gelu(self.model)
        self.objective = Objective(self.model, precision)
        self.loss: Callable[[Tensor], Tensor] = (
            torch.compile(self.objective, dynamic=False) if compiled else self.objective
        )

    def prepare(self) -> None:
        """Compile, by one step on tokens drawn at random."""
        shape = (self.train.batch, self.config.context + 1)
        self.loss(torch.randint(self.config.vocab_size, shape, device=self.device)).backward()
        self.model.zero_grad(set_to_none=True)
        self.free()

    def free(self) -> None:
        """Free cached memory: other processes train on the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def run(self, member: Member, steps: int, tokens: TokenSplit) -> TimedCurve:
        """Train from initial weights, and evaluate on the whole validation text."""
        train = settings_of(self.train, member, steps)
        self.model.load_state_dict(first_weights(self.fresh, member))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        logged, diverged = self.train_steps(member, train, tokens.train)
        valid_loss = math.nan if diverged is not None else self.valid_loss(tokens.valid)
        at = tuple(step for step, _, _ in logged)
        curve = Curve(member, at, tuple(loss for _, loss, _ in logged), valid_loss, diverged)
        seconds = tuple(time for _, _, time in logged)
        held = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None
        self.free()
        return TimedCurve(curve, seconds, speed(at, seconds) * train.batch * self.config.context, held)

    def train_steps(
        self, member: Member, train: Train, text: TokenArray
    ) -> tuple[list[tuple[int, float, float]], int | None]:
        """(step, mean loss since the line before, seconds), and the logged step at which the loss was not finite."""
        optimizer = make_optimizer(self.model, train, self.device)
        total, last, logged = torch.zeros((), device=self.device), 0, []
        start = time.perf_counter()
        for number in range(train.steps):
            set_learning_rate(optimizer, learning_rate(train, number))
            total += self.one_step(optimizer, member, self.tokens(text, number, train))
            step = number + 1
            if step % train.log_every == 0 or step == train.steps:
                mean = float(total) / (step - last)
                logged.append((step, mean, time.perf_counter() - start))
                if not math.isfinite(mean):
                    return logged, step
                total, last = torch.zeros_like(total), step
        return logged, None

    def tokens(self, text: TokenArray, number: int, train: Train) -> Tensor:
        drawn = batch(text, number, train.seed, train.batch, self.config.context)
        drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
        return drawn.to(self.device, non_blocking=True)

    def one_step(self, optimizer: torch.optim.Optimizer, member: Member, tokens: Tensor) -> Tensor:
        """Forward, backward, clip, update; the loss stays on the device."""
        loss: Tensor = self.loss(tokens)
        loss.backward()
        if not member.learned_scale:
            for name, parameter in self.model.named_parameters():
                if name.endswith("log_scale"):
                    parameter.grad = None  # a constant scale: the same graph, but no update
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def valid_loss(self, valid: TokenArray) -> float:
        """Nats per token over all windows of the text, by the model that is not compiled."""
        self.judge.model.load_state_dict(self.model.state_dict())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        every = windows(valid, self.config.context)
        for part in every.split(self.train.batch):
            total += self.judge(part.to(self.device)).double() * len(part)
        return float(total) / len(every)


def settings_of(train: Train, member: Member, steps: int) -> Train:
    """The settings of one member: its own seed, rate and decay, and a schedule that scales with the steps."""
    return replace(
        train,
        steps=steps,
        warmup=max(1, steps // 10),
        log_every=max(1, steps // 40),
        seed=member.seed,
        learning_rate=member.learning_rate,
        weight_decay=member.weight_decay,
    )


def first_weights(model: TransformerForCausalLM, member: Member) -> dict[str, Tensor]:
    """Initial weights, each module with a seed of its own; with the model on the CPU, the same on every machine."""
    for name, module in model.named_modules():
        torch.manual_seed(zlib.crc32(f"{member.seed} {name}".encode()))
        model.initialise(module)
    for name, weight in model.named_parameters():
        if name.endswith("log_scale"):
            weight.data.fill_(math.log(member.scale))
    return model.state_dict()


def speed(steps: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    """Steps per second: the median between two lines of the log, so that a pause does not count."""
    times = [0.0, *seconds]
    gone = [b - a for a, b in zip((0, *steps), steps, strict=False)]
    return statistics.median(n / (b - a) for n, a, b in zip(gone, times, times[1:], strict=False))
