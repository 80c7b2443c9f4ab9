"""What is trained at 38 M parameters, in which order, and what is left of it.

A *variant* is a shape with its settings. Some variants are swept: the first seed is trained at learning rates that
differ by factors of two, until the best one has a worse neighbour on both sides; then the other seeds are trained at
the best. The sweep has the length of the runs that are judged, so no rate is extrapolated, except for runs of 157 M
bytes: they take the best rate of 67 M bytes × (ratio of steps)^−0.32 (arXiv 2409.19913), every shape alike. Variants
that change little (biases, heads, exact changes of basis) take the rate of a swept one. All runs of one seed begin with
the same weights, as far as both shapes have them, and see the same text in the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from large_record import Run, loss_of, member_of
from large_shapes import BIASED, BOUND, EQUAL, KINDS, PLANS, POST, PROJECTIONS, SCALED, SHAPES

from deadweight.train.ensemble import Member
from deadweight.train.repeated_runs import TrainingJob

STEPS, LONG, BATCH = 4096, 9600, 32  # 67 M and 157 M bytes
LAW = -0.32
SIDE_BY_SIDE = 3  # runs of one graph that share the GPU
SEEDS = (0, 1, 2)
DECAY, THIRD = 0.1, 0.03125
RATE = 6.78e-4  # where sweeps begin: found for each of these shapes by a sweep of short runs (docs/query-weights.md)
FIRST_RATES = {
    "full": RATE,
    "identity Q": 8.88e-4,
    "identity K": 8.47e-4,
    "identity V": 6.92e-4,
    "identity Q, larger MLP": 1.01e-3,
}
OCTAVES = (-3, 5)  # factors of two that a sweep does not go beyond
ROUNDED = (4, 3)  # bits per weight, after training
EVERY = 100  # steps between two exact changes of the weights


@dataclass(frozen=True)
class Variant:
    """A shape with its settings. `rate_of` names the variant whose best learning rate it takes; itself, if it is swept.
    `octaves` are added to that rate, and the law of longer runs applies to it."""

    name: str
    shape: str
    rate_of: str
    octaves: int = 0
    scale: float = 1.0
    learned_scale: bool = False
    decay: float = DECAY
    upkeep: str | None = None
    is_long: bool = False

    @property
    def steps(self) -> int:
        return LONG if self.is_long else STEPS

    @property
    def graph(self) -> str:
        return self.shape if self.scale == 1.0 and not self.learned_scale else self.shape + SCALED

    def member(self, seed: int, rate: float) -> Member:
        return Member(seed, rate, self.decay, self.scale, self.learned_scale)


def swept(*names: str) -> Iterator[Variant]:
    yield from (Variant(name, name, name) for name in names)


def at_rate_of(other: str, *names: str) -> Iterator[Variant]:
    yield from (Variant(name, name, other) for name in names)


def changed(base: str) -> Iterator[Variant]:
    """Scales and decay of a projection shape, at its own best rate."""
    plain = Variant(base, base, base)
    yield replace(plain, name=f"{base}, half the scale", scale=0.5)
    yield replace(plain, name=f"{base}, twice the scale", scale=2.0)
    yield replace(plain, name=f"{base}, learned scale", learned_scale=True)
    yield replace(plain, name=f"{base}, a third of the decay", decay=THIRD)


def kept_in_gauge() -> Iterator[Variant]:
    plain = Variant("full", "full", "full")
    for upkeep in ("balance", "dead directions", "both"):
        yield replace(plain, name=f"upkeep: {upkeep}", upkeep=upkeep)
    for octaves in (2, 3):
        yield replace(plain, name=f"{2**octaves} × the rate", octaves=octaves)
        yield replace(plain, name=f"{2**octaves} × the rate, upkeep: both", octaves=octaves, upkeep="both")


LONGER = ", 157 M bytes"


def longer(*names: str) -> Iterator[Variant]:
    yield from (Variant(name + LONGER, name, name, is_long=True) for name in names)


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        *swept(*PROJECTIONS, "rotary", "post-norm"),
        *longer(*PROJECTIONS),
        *at_rate_of("full", *EQUAL, *PLANS, *BIASED),
        *at_rate_of("rotary", *(n for n in SHAPES if n.startswith("rotary, "))),
        *at_rate_of("post-norm", *(n for n in POST if n != "post-norm")),
        *changed("full"),
        *changed("identity Q"),
        *kept_in_gauge(),
    )
}


@dataclass(frozen=True)
class Part:
    """A comparison that is finished before the next one begins: each variant against its base."""

    study: str
    question: str
    base: str
    variants: tuple[str, ...]
    copies: int = 1  # times each seed is trained: more than once measures how much reruns differ
    seeds: tuple[int, ...] = SEEDS


def leave_one_out(base: str, kinds: Iterable[str] = KINDS) -> tuple[str, ...]:
    return tuple(f"{base} but {kind}" for kind in kinds)


def long_part(*names: str) -> Part:
    return Part("S2", f"The same, after {LONGER[2:]}", "full" + LONGER, tuple(name + LONGER for name in names))


RERUN = "Do two runs of one seed agree?"
PARTS: tuple[Part, ...] = (
    Part("noise", RERUN, "full", ("full",), copies=2, seeds=SEEDS[:1]),  # fills the GPU beside the sweep
    Part("S2", "Can queries do without weights?", "full", ("identity Q",)),
    Part("S2", "Can keys do without weights?", "full", ("identity K",)),
    Part("S2", "Can values do without weights?", "full", ("identity V",)),
    Part("S1", "Do biases earn their place at all?", "full", ("all biases",)),
    Part("gauge", "Does training without the gauge change anything?", "full", ("upkeep: both",)),
    Part("S3", "Larger or smaller heads?", "full", ("16 × 32", "4 × 128")),
    Part("S2", "Are query weights worth more in the MLP?", "full", ("identity Q, larger MLP",)),
    Part("S2", "Are value weights worth more in the MLP?", "full", ("identity V, larger MLP",)),
    long_part("identity Q"),
    long_part("identity K", "identity V"),
    long_part("identity Q, larger MLP", "identity V, larger MLP"),
    Part("S2", "Are key weights worth more in the MLP?", "full", ("identity K, larger MLP",)),
    Part("S2", "Neither query nor value weights?", "full", ("identity Q and V", "identity Q and V, larger MLP")),
    Part("S2", "A smaller MLP instead?", "identity Q", ("full, smaller MLP",)),
    Part("S2", "Half the scale", "identity Q", ("identity Q, half the scale",)),
    Part("S2", "A third of the decay", "identity Q", ("identity Q, a third of the decay",)),
    long_part("identity K, larger MLP", "identity Q and V", "identity Q and V, larger MLP"),
    Part("S3", "Heads with rotary positions", "rotary", ("rotary, 16 × 32", "rotary, 4 × 128")),
    Part("S1", "Which bias earns its place?", "all biases", leave_one_out("all biases")),
    Part("gauge", "Which part of it?", "full", ("upkeep: balance", "upkeep: dead directions")),
    Part("gauge", "At four times the rate", "4 × the rate", ("4 × the rate, upkeep: both",)),
    Part("S3", "Very large and very small heads", "full", ("2 × 256", "32 × 16")),
    Part("S3", "The plan of the error bound", "full", (BOUND,)),
    Part("S3", "Heads that differ between layers", "full", tuple(name for name in PLANS if name != BOUND)),
    Part("S1", "With post-norm: do biases earn their place?", "post-norm", ("post-norm, all biases",)),
    Part("S1", "With post-norm: which?", "post-norm, all biases", leave_one_out("post-norm, all biases")),
    Part("S1", "With rotary positions: all biases?", "rotary", ("rotary, all biases",)),
    Part("S1", "With rotary positions: the key bias?", "rotary, all biases", ("rotary, all biases but K",)),
    Part("S2", "Other scales", "identity Q", ("identity Q, twice the scale", "identity Q, learned scale")),
    Part("S2", "Scales and decay of the full shape", "full", tuple(v.name for v in changed("full"))),
    Part("S3", "Very large and small heads, rotary positions", "rotary", ("rotary, 2 × 256", "rotary, 32 × 16")),
    Part("gauge", "At eight times the rate", "8 × the rate", ("8 × the rate, upkeep: both",)),
)


def rate_at(name: str, octaves: int) -> float:
    """A learning rate of the grid of a swept variant."""
    return float(f"{FIRST_RATES.get(name, RATE) * 2**octaves:.3g}")


class StudyPlan:
    """The plan beside a record: what is done, what is known, what is left."""

    def __init__(self, runs: list[Run]) -> None:
        self.by_settings: dict[tuple[str, Member, str | None, int], list[Run]] = defaultdict(list)
        for run in runs:
            self.by_settings[run["graph"], member_of(run), run.get("upkeep"), run["steps"]].append(run)
        self.swept: dict[str, dict[int, float]] = {}

    def of(self, variant: Variant, member: Member) -> list[Run]:
        """All runs with these settings."""
        return self.by_settings.get((variant.graph, member, variant.upkeep, variant.steps), [])

    def losses(self, variant: Variant, member: Member) -> list[float]:
        return [loss_of(run) for run in self.of(variant, member)]

    def sweep(self, name: str) -> dict[int, float]:
        """Loss of the first seed by octave above the first rate."""
        if name in self.swept:
            return self.swept[name]
        variant, losses = VARIANTS[name], {}
        for octave in range(OCTAVES[0], OCTAVES[1] + 1):
            if found := self.losses(variant, variant.member(SEEDS[0], rate_at(name, octave))):
                losses[octave] = sum(found) / len(found)
        self.swept[name] = losses
        return losses

    def octaves_to_try(self, name: str) -> list[int]:
        """Octaves that the sweep still needs; none when the best has a worse neighbour on both sides."""
        losses = self.sweep(name)
        middle = 0 if name in FIRST_RATES else self.best_octave("full") or 0
        if middle not in losses:
            return [o for o in (middle - 1, middle, middle + 1) if o not in losses]
        best = min(losses, key=lambda octave: losses[octave])
        wanted = [o for o in (best - 1, best + 1) if OCTAVES[0] <= o <= OCTAVES[1]]
        return [o for o in wanted if o not in losses]

    def best_octave(self, name: str) -> int | None:
        """The best octave of a finished sweep; None before."""
        losses = self.sweep(name)
        if not losses or self.octaves_to_try(name):
            return None
        return min(losses, key=lambda octave: losses[octave])

    def rate(self, variant: Variant) -> float | None:
        best = self.best_octave(variant.rate_of)
        if best is None:
            return None
        rate = rate_at(variant.rate_of, best + variant.octaves)
        return float(f"{rate * (variant.steps / STEPS) ** LAW:.3g}") if variant.is_long else rate

    def missing(self, part: Part) -> list[TrainingJob]:
        """The jobs of a part that can be trained now: sweeps first, then the other seeds, base and variants alike."""
        names = list(dict.fromkeys((part.base, *part.variants)))
        sources = list(dict.fromkeys(VARIANTS[name].rate_of for name in names))
        jobs = [job for name in sources if (job := self.sweep_job(VARIANTS[name])) is not None]
        return together(jobs + [job for name in names if (job := self.seeds_job(VARIANTS[name], part)) is not None])

    def sweep_job(self, variant: Variant) -> TrainingJob | None:
        rates = [rate_at(variant.name, octave) for octave in self.octaves_to_try(variant.name)]
        return self.job(variant, [variant.member(SEEDS[0], rate) for rate in rates])

    def seeds_job(self, variant: Variant, part: Part) -> TrainingJob | None:
        """One more copy of every seed that has too few."""
        rate = self.rate(variant) if part.copies == 1 else rate_at(variant.name, 0)
        if rate is None:
            return None
        members = [variant.member(seed, rate) for seed in part.seeds]
        return self.job(variant, [m for m in members if len(self.of(variant, m)) < part.copies])

    def job(self, variant: Variant, members: list[Member]) -> TrainingJob | None:
        if not members:
            return None
        settings = {"upkeep": variant.upkeep, "every": EVERY, "rounded_to": ROUNDED}
        return TrainingJob(variant.graph, tuple(members), variant.steps, **settings)

    def left(self) -> list[TrainingJob]:
        """All jobs that can be trained now, first things first; no part repeats what an earlier one asks for."""
        jobs: list[TrainingJob] = []
        for part in PARTS:
            asked = {(replace(job, members=()), member) for job in jobs for member in job.members}
            for job in self.missing(part):
                new = tuple(m for m in job.members if (replace(job, members=()), m) not in asked)
                jobs += [replace(job, members=new)] if new else []
        return jobs


def together(jobs: list[TrainingJob]) -> list[TrainingJob]:
    """Jobs that differ in their members alone, as one, or as many as it takes: a job of three runs fills the GPU."""
    members: dict[TrainingJob, list[Member]] = defaultdict(list)
    for job in jobs:
        members[replace(job, members=())] += job.members
    return [
        replace(job, members=tuple(mine[first : first + SIDE_BY_SIDE]))
        for job, mine in members.items()
        for first in range(0, len(mine), SIDE_BY_SIDE)
    ]


def expected_jobs(runs: list[Run]) -> Iterator[tuple[Part, TrainingJob]]:
    """What is left if the first rate of every sweep is the best: each job with the part that needs it."""
    played = list(runs)
    for part in PARTS:
        while jobs := StudyPlan(played).missing(part):
            for member in jobs[0].members:
                line = {"graph": jobs[0].graph, "steps": jobs[0].steps, "member": asdict(member)}
                away = abs(math.log2(member.learning_rate / FIRST_RATES.get(jobs[0].graph, RATE)))
                played.append({**line, "upkeep": jobs[0].upkeep, "valid_loss": 1.0 + away})
            yield part, jobs[0]
