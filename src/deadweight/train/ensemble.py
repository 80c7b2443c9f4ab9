"""Many models of one shape, trained together: seeds and settings differ, the kernels are shared.

A small model leaves most of a GPU idle. Here every weight has a leading axis of members, and one batched product serves
all of them, so a study with dozens of runs takes little longer than one run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from deadweight.progress import Progress, silent
from deadweight.train.data import TokenSplit, batch, windows
from deadweight.train.objective import Objective
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

Weights = dict[str, Tensor]
READOUT, EMBEDDING = "model.readout.weight", "model.transformer.tokens.weight"
BATCHED = {  # the attention kernels that vmap can batch; it would call others once per member
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cpu": [SDPBackend.MATH],
}


@dataclass(frozen=True)
class Member:
    """The settings of one model. `scale` multiplies 1/√d_qk, or is the initial value of a learned scale."""

    seed: int
    learning_rate: float
    weight_decay: float
    scale: float = 1.0
    learned_scale: bool = False


@dataclass(frozen=True)
class Curve:
    """The losses of one member."""

    member: Member
    steps: tuple[int, ...]
    train_loss: tuple[float, ...]  # nats per token, mean since the step before
    valid_loss: float
    diverged_at: int | None  # the first step whose loss was not finite


class Ensemble:
    """The stacked weights of all members and their optimizer."""

    def __init__(
        self,
        config: TransformerConfig,
        members: Sequence[Member],
        train: Train,
        device: torch.device | None = None,
        compiled: bool | None = None,
    ) -> None:
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        compiled = (device.type == "cuda" if train.compile is None else train.compile) if compiled is None else compiled
        own = {**config.to_dict(), "learned_scale": True}  # a constant scale is a learned one that is not updated
        own = {k: v for k, v in own.items() if k in TransformerConfig.__dataclass_fields__}
        self.config, self.members, self.train, self.device = TransformerConfig(**own), members, train, device
        self.precision = torch.bfloat16 if device.type == "cuda" and train.precision != "fp32" else torch.float32
        self.kernels = BATCHED.get(device.type, [SDPBackend.MATH])
        self.base = Objective(TransformerForCausalLM(self.config).to(device).train(), self.precision)
        self.weights = self.stack_members()
        self.first = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in self.weights.items()}
        per = lambda values: torch.tensor(values, device=device, dtype=torch.float32)  # noqa: E731
        self.rates = per([m.learning_rate for m in members])
        self.decays = per([m.weight_decay for m in members])
        self.learns = per([float(m.learned_scale) for m in members])
        self.losses = torch.compile(self.all_losses, dynamic=False) if compiled else self.all_losses
        self.update = torch.compile(self.all_updates, dynamic=False) if compiled else self.all_updates

    def stack_members(self) -> Weights:
        """The weights of all members, each initialised with its own seed."""
        weights: list[Weights] = []
        for member in self.members:
            torch.manual_seed(member.seed)
            model = TransformerForCausalLM(self.config)
            for name, weight in model.named_parameters():
                if name.endswith("log_scale"):
                    weight.data.fill_(math.log(member.scale))
            weights.append({f"model.{n}": p.detach() for n, p in model.named_parameters()})
        return {n: torch.stack([f[n] for f in weights]).to(self.device).requires_grad_() for n in weights[0]}

    def all_losses(self, weights: Weights, tokens: Tensor) -> Tensor:
        """The loss of every member on its own windows."""

        def one(mine: Weights, windows: Tensor) -> Tensor:
            tied = {READOUT: mine[EMBEDDING]} if self.config.tie_word_embeddings else {}
            return functional_call(self.base, {**tied, **mine}, (windows,))

        return vmap(one)(weights, tokens)

    def step(self, number: int, tokens: Tensor) -> Tensor:
        with sdpa_kernel(self.kernels):
            losses = self.losses(self.weights, tokens)
        gradients = torch.autograd.grad(losses.sum(), list(self.weights.values()))
        factor = learning_rate(replace(self.train, learning_rate=1.0), number)
        self.update(dict(zip(self.weights, gradients, strict=True)), self.rates * factor, torch.tensor(number + 1.0))
        return losses.detach()

    @torch.no_grad()
    def all_updates(self, gradients: Weights, rates: Tensor, number: Tensor) -> None:
        """AdamW with each member's rate and decay, its gradient clipped by its own norm."""
        train = self.train
        norm = sum(g.float().flatten(1).square().sum(1) for g in gradients.values())
        clip = (train.clip / (torch.as_tensor(norm).sqrt() + 1e-6)).clamp(max=1.0)
        one, two = 1 - train.beta1**number, 1 - train.beta2**number
        for name, weight in self.weights.items():
            shape = (-1, *[1] * (weight.dim() - 1))
            gradient = gradients[name].float() * clip.view(shape)
            first, second = self.first[name], self.second[name]
            first.mul_(train.beta1).add_(gradient, alpha=1 - train.beta1)
            second.mul_(train.beta2).addcmul_(gradient, gradient, value=1 - train.beta2)
            rate = rates * self.learns if name.endswith("log_scale") else rates
            decay = rates * self.decays if weight.dim() > 2 else torch.zeros_like(rates)
            weight.mul_(1 - decay.view(shape))
            weight.sub_(rate.view(shape) * (first / one) / ((second / two).sqrt() + 1e-8))

    @torch.no_grad()
    def valid_losses(self, tokens: Tensor, rows: int) -> list[float]:
        """The mean loss of every member on the same windows."""
        total, count = torch.zeros(len(self.members), device=self.device), 0
        for part in tokens.split(rows):
            if len(part) < rows and count:
                break  # a second shape would be compiled again
            same = part.to(self.device).expand(len(self.members), *part.shape)
            with sdpa_kernel(self.kernels):
                total += self.losses(self.weights, same) * len(part)
            count += len(part)
        return (total / count).tolist()


def train_together(ensemble: Ensemble, tokens: TokenSplit, progress: Progress = silent) -> list[Curve]:
    """Train all members for the same steps; those with the same seed see the same text in the same order."""
    members, train, device, context = ensemble.members, ensemble.train, ensemble.device, ensemble.config.context
    every, logged = torch.zeros(len(members), device=device), []
    broken = torch.full((len(members),), -1, device=device)
    start = time.perf_counter()
    for number in range(train.steps):
        drawn = {s: batch(tokens.train, number, s, train.batch, context) for s in {m.seed for m in members}}
        stacked = torch.stack([drawn[m.seed] for m in members]).to(device, non_blocking=True)
        losses = ensemble.step(number, stacked)
        every += losses
        broken = torch.where((broken < 0) & ~torch.isfinite(losses), number, broken)
        if (number + 1) % train.log_every == 0 or number + 1 == train.steps:
            passed = train.log_every if (number + 1) % train.log_every == 0 else train.steps % train.log_every
            logged.append((number + 1, (every / passed).tolist()))
            every = torch.zeros_like(every)
            speed = (number + 1) * stacked[..., 1:].numel() / (time.perf_counter() - start)
            finite = [v for v in logged[-1][1] if math.isfinite(v)]
            progress(f"step {number + 1}: loss {sum(finite) / max(len(finite), 1):.3f}, {speed:,.0f} tokens/s in total")
    ends = ensemble.valid_losses(windows(tokens.valid, context, train.evaluate_tokens), train.batch)
    first_bad = broken.tolist()
    return [
        Curve(
            member,
            tuple(n for n, _ in logged),
            tuple(values[i] for _, values in logged),
            ends[i],
            first_bad[i] if first_bad[i] >= 0 else None,
        )
        for i, member in enumerate(members)
    ]
