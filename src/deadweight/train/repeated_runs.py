"""Many training runs of one shape: the graph is compiled once, the weights are initialised anew.

The initial weights of a module depend only on the seed and on its name. So two shapes with the same seed start with the
same weights in the modules that both have, and read the same text in the same order: their losses can be paired.
Several runs share the GPU, each on a stream of its own.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deadweight.train.data import TokenArray, TokenSplit, windows
from deadweight.train.device_run import DeviceRun, RunLog, train_side_by_side
from deadweight.train.ensemble import Curve, Member
from deadweight.train.fast_gelu import with_fast_gelu
from deadweight.train.gauge import UPKEEPS
from deadweight.train.objective import Objective, precision_of
from deadweight.train.rounded_weights import round_linear_layers
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

JUDGED = 128  # windows per forward pass of an evaluation
TRIED, SAME = 20, 5e-2  # steps of the trial of CUDA graphs, and how much losses may differ, relative to the first
SMOOTH = 1e-4  # learning rate of the trial: at 1e-3 the loss of 38 M parameters jumps, and rounding decides where
ROUNDED_ON = 1_000_000  # tokens of the validation text that judge rounded weights


@dataclass(frozen=True)
class TrainingJob:
    """Runs of one graph that train side by side. `graph` names the shape; its process compiles it once."""

    graph: str
    members: tuple[Member, ...]
    steps: int
    judged_on: int | None = None  # tokens of the validation text; None: all
    upkeep: str | None = None  # an exact change of the weights along the way, by its name in `gauge.UPKEEPS`
    every: int = 100  # steps between two such changes
    rounded_to: tuple[int, ...] = ()  # bits per weight: the loss is measured with rounded weights too


@dataclass(frozen=True)
class TimedCurve:
    """The losses of one run, its times and its memory."""

    curve: Curve
    seconds: tuple[float, ...]  # since the start, at the steps of the curve
    tokens_per_second: float  # median over the steps of the curve, with the other runs beside it
    gigabytes: float | None  # peak memory of torch on the GPU, all runs of the job together
    rounded: dict[int, float] = field(default_factory=dict)  # loss with weights of that many bits
    graphs: bool = False  # whether its steps were replayed as CUDA graphs


class Repeated:
    """One shape on one device, trained as often as asked. `graphs`: whether a GPU replays steps as CUDA graphs."""

    def __init__(self, config: TransformerConfig, train: Train, device: torch.device, *, graphs: bool = True) -> None:
        self.config, self.train, self.device = config, train, device
        self.graphs = graphs and device.type == "cuda"
        self.precision = precision_of(train, device)
        self.compiled = device.type == "cuda" if train.compile is None else train.compile
        self.fresh = TransformerForCausalLM(config)
        self.judge = Objective(TransformerForCausalLM(config).to(device).train(), self.precision)
        self.models: list[TransformerForCausalLM] = []
        self.losses: list[Callable[[Tensor], Tensor]] = []
        self.text: Tensor | None = None

    def prepare(self, side_by_side: int = 1) -> None:
        """Compile for as many runs at a time, by one step of each on tokens drawn at random."""
        shape = (self.train.batch, self.config.context + 1)
        while len(self.models) < side_by_side:
            self.add_model()
            self.losses[-1](torch.randint(self.config.vocab_size, shape, device=self.device)).backward()
            self.models[-1].zero_grad(set_to_none=True)
        if self.graphs:
            self.graphs = self.graphs_agree()
        self.free()

    def graphs_agree(self) -> bool:
        """Whether replayed steps have the losses of plain ones; if a GPU cannot do it, steps stay plain."""
        train = settings_of(self.train, Member(0, SMOOTH, 0.1), TRIED)
        text = torch.arange(1 << 16, device=self.device) % 7  # easy to learn: the loss falls at once
        run = DeviceRun(self.models[0], self.losses[0], train, text)
        plain = train_side_by_side([run])[0].losses
        try:
            run.capture()
            replayed = train_side_by_side([run])[0].losses
        except RuntimeError as error:
            print(f"steps are not replayed as CUDA graphs: {error}", flush=True)
            return False
        same = replayed[-1] < 0.9 * replayed[0] and all(
            abs(a - b) < SAME * plain[0] for a, b in zip(plain, replayed, strict=True)
        )
        if not same:
            print(f"steps are not replayed as CUDA graphs: losses {replayed} instead of {plain}", flush=True)
        return same

    def add_model(self) -> None:
        """One more set of weights, for one more run at a time."""
        model = TransformerForCausalLM(self.config).to(self.device).train()
        if self.compiled and self.device.type == "cuda" and self.precision == torch.bfloat16:
            with_fast_gelu(model)
        objective = Objective(model, self.precision)
        self.models.append(model)
        self.losses.append(torch.compile(objective, dynamic=False) if self.compiled else objective)

    def free(self) -> None:
        """Free cached memory: other processes compile on the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def run(self, job: TrainingJob, tokens: TokenSplit) -> list[TimedCurve]:
        """Train from initial weights, and evaluate on the validation text."""
        while len(self.models) < len(job.members):
            self.add_model()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        runs = [self.begin(place, member, job.steps, tokens.train) for place, member in enumerate(job.members)]
        logs = train_side_by_side(runs, UPKEEPS[job.upkeep] if job.upkeep else None, job.every)
        held = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None
        del runs
        self.free()
        told = zip(self.models, job.members, logs, strict=False)
        return [self.outcome(model, member, log, job, tokens.valid, held) for model, member, log in told]

    def begin(self, place: int, member: Member, steps: int, text: TokenArray) -> DeviceRun:
        """A run at its start, with its step captured if CUDA graphs are used."""
        model = self.models[place]
        model.load_state_dict(first_weights(self.fresh, member))
        run = DeviceRun(model, self.losses[place], settings_of(self.train, member, steps), self.on_device(text))
        run.constant_scale = not member.learned_scale
        if self.graphs:
            run.capture()
        return run

    def on_device(self, text: TokenArray) -> Tensor:
        if self.text is None or len(self.text) != len(text):
            self.text = torch.tensor(text, device=self.device)
        return self.text

    def outcome(
        self,
        model: TransformerForCausalLM,
        member: Member,
        log: RunLog,
        job: TrainingJob,
        valid: TokenArray,
        held: float | None,
    ) -> TimedCurve:
        bad = log.diverged_at is not None
        loss = math.nan if bad else self.valid_loss(model, valid)
        curve = Curve(member, tuple(log.steps), tuple(log.losses), loss, log.diverged_at)
        rounded = {} if bad else {b: self.valid_loss(model, valid[:ROUNDED_ON], b) for b in job.rounded_to}
        per_step = self.train.batch * self.config.context
        times = tuple(log.seconds)
        return TimedCurve(curve, times, speed(curve.steps, times) * per_step, held, rounded, self.graphs)

    @torch.no_grad()
    def valid_loss(self, model: TransformerForCausalLM, valid: TokenArray, bits: int | None = None) -> float:
        """Nats per token over all windows of the text, by a model that is not compiled; `bits` rounds its weights."""
        self.judge.model.load_state_dict(model.state_dict())
        if bits is not None:
            round_linear_layers(self.judge.model, bits)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        every = windows(valid, self.config.context)
        for part in every.split(JUDGED):
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
