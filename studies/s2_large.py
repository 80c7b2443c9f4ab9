"""The query study at 38 M parameters: what is trained, in which order, and the record that a later call continues.

12 layers of width 512, context 512, bytes of enwik8 in its usual split (90 M to train on, the next 5 M to judge by).
Runs have three lengths: *short* (20 M bytes), *middle* (67 M) and *long* (157 M), each with its whole schedule.

The learning rate of a shape is swept on short runs of one seed, by factors of two until the best has a worse neighbour
on both sides. Longer runs want lower rates: rate ∝ steps^−0.32 (arXiv 2409.19913), for every shape alike; middle runs
at twice that rate check it. Runs of one seed begin with the same weights and see the same text in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from deadweight.errors import DeadweightError
from deadweight.report.record import circumstances
from deadweight.source.plain_text import check_text, read_text
from deadweight.train.ensemble import Member
from deadweight.train.gpu_queue import Agenda, Queue, TrainingJob, WorkerSetup
from deadweight.train.repeated_runs import TimedCurve
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

Run = dict[str, Any]
SIZES = {"d_model": 512, "n_layers": 12, "heads": 8, "context": 512, "vocab_size": 256}
BATCH = 32
SHORT, MIDDLE, LONG = 1216, 4096, 9600  # steps
SPLIT = (90, 95)  # hundredths of the text: where training text and validation text end
QUICK = 1_000_000  # bytes of validation text that judge a short run
LAW = -0.32
RATES = (5e-4, 1e-3, 2e-3)
EXTREMES = (1e-4, 3e-2)
SEEDS = (0, 1, 2)
DECAY, THIRD = 0.1, 0.03125
MORE, TWICE_MORE, LESS = 9 * 512 // 2, 10 * 512 // 2, 7 * 512 // 2  # hidden units for the weights of one projection
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "identity Q": {"query": "identity"},
    "identity V": {"value": "identity"},
    "identity K": {"key": "identity"},
    "identity Q, larger MLP": {"query": "identity", "hidden": MORE},
    "identity V, larger MLP": {"value": "identity", "hidden": MORE},
    "identity K, larger MLP": {"key": "identity", "hidden": MORE},
    "identity Q and V": {"query": "identity", "value": "identity"},
    "identity Q and V, larger MLP": {"query": "identity", "value": "identity", "hidden": TWICE_MORE},
    "full, smaller MLP": {"hidden": LESS},
}
VARIANTS: list[dict[str, Any]] = [
    {"scale": 0.5},
    {"scale": 2.0},
    {"learned_scale": True},
    {"weight_decay": THIRD},
]
CORE = ("full", "identity Q", "identity V", "identity K")
SCALED = ", scaled"  # the graph of a shape in which the attention scale is a number of its own


def config(graph: str) -> dict[str, Any]:
    shape = graph.removesuffix(SCALED)
    return {**SIZES, **SHAPES[shape], **({"learned_scale": True} if graph != shape else {})}


def job(shape: str, steps: int, member: Member) -> TrainingJob:
    plain = member.scale == 1.0 and not member.learned_scale
    return TrainingJob(shape if plain else shape + SCALED, member, steps, QUICK if steps == SHORT else None)


def shape_of(run: Run) -> str:
    return str(run["graph"]).removesuffix(SCALED)


def loss_of(run: Run) -> float:
    """The loss of a run; infinite if it diverged."""
    return math.inf if run["valid_loss"] is None else float(run["valid_loss"])


def sweep(runs: list[Run], shape: str) -> dict[float, float]:
    """Loss by learning rate, of the short runs of the first seed."""
    plain = asdict(Member(SEEDS[0], 0.0, DECAY))
    losses = {}
    for run in runs:
        rate = run["member"]["learning_rate"]
        if run["graph"] == shape and run["steps"] == SHORT and run["member"] == {**plain, "learning_rate": rate}:
            losses[rate] = loss_of(run)
    return losses


def rates_to_try(swept: dict[float, float]) -> list[float]:
    """The first three learning rates, then more while the best is at the edge. Empty when the sweep is finished."""
    missing = [rate for rate in RATES if rate not in swept]
    if missing:
        return missing
    best = min(swept, key=lambda rate: swept[rate])
    further = {max(swept): 2 * best, min(swept): best / 2}.get(best)
    return [further] if further is not None and EXTREMES[0] < further < EXTREMES[1] else []


def best_rate(swept: dict[float, float]) -> float:
    return min(swept, key=lambda rate: swept[rate])


def optimum(swept: dict[float, float]) -> float:
    """The vertex of the parabola through the best learning rate and its neighbours, in the logarithm of the rate."""
    best = best_rate(swept)
    low, here, high = (swept.get(rate, math.inf) for rate in (best / 2, best, 2 * best))
    if not math.isfinite(low + high):
        return best
    return float(f"{best * 2 ** (0.5 * (low - high) / (low - 2 * here + high)):.3g}")


def rate_for(swept: dict[float, float], steps: int) -> float:
    return float(f"{optimum(swept) * (steps / SHORT) ** LAW:.3g}")


class StudyPlan:
    """The jobs in order; jobs that depend on an unfinished sweep are left out."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.swept = {shape: sweep(runs, shape) for shape in SHAPES}
        self.known = [shape for shape in SHAPES if not rates_to_try(self.swept[shape])]
        self.done = {(r["graph"], r["steps"], json.dumps(r["member"])) for r in runs}

    def left(self) -> list[TrainingJob]:
        jobs = dict.fromkeys(self.every())
        return [j for j in jobs if (j.graph, j.steps, json.dumps(asdict(j.member))) not in self.done]

    def every(self) -> Iterable[TrainingJob]:
        pair, larger = ("full", "identity Q"), ("identity Q, larger MLP", "identity V, larger MLP")
        yield from self.sweeps(CORE)
        yield from self.full_runs(MIDDLE, pair)
        yield from self.short(CORE)
        yield from self.short(pair, scale=0.5)
        yield from self.checks(pair)
        yield from self.full_runs(MIDDLE, CORE)
        yield from self.sweeps(larger)
        yield from self.full_runs(MIDDLE, larger)
        yield from self.full_runs(MIDDLE, ("identity Q",), scale=0.5, weight_decay=THIRD)
        yield from self.full_runs(LONG, pair)
        yield from self.sweeps(SHAPES)
        yield from self.short(SHAPES)
        for variant in VARIANTS:
            yield from self.short(pair, **variant)
        yield from self.full_runs(LONG, SHAPES)
        for variant in VARIANTS:
            yield from self.full_runs(LONG, pair, **variant)

    def checks(self, shapes: Iterable[str]) -> Iterable[TrainingJob]:
        """One seed at twice the learning rate, to check the rates of the longer runs."""
        for shape in self.ready(shapes):
            rate = float(f"{2 * rate_for(self.swept[shape], MIDDLE):.3g}")
            yield job(shape, MIDDLE, Member(SEEDS[0], rate, DECAY))

    def ready(self, shapes: Iterable[str]) -> list[str]:
        return [shape for shape in shapes if shape in self.known]

    def sweeps(self, shapes: Iterable[str]) -> Iterable[TrainingJob]:
        """Rate by rate, for all shapes."""
        wanted = [(rate, shape) for shape in shapes for rate in rates_to_try(self.swept[shape])]
        for rate, shape in sorted(wanted, key=lambda pair: pair[0]):
            yield job(shape, SHORT, Member(SEEDS[0], rate, DECAY))

    def short(self, shapes: Iterable[str], **changes: Any) -> Iterable[TrainingJob]:
        """All seeds, at the best rate of the sweep."""
        for seed in SEEDS:
            for shape in self.ready(shapes):
                yield job(
                    shape, SHORT, Member(seed, best_rate(self.swept[shape]), **{"weight_decay": DECAY, **changes})
                )

    def full_runs(self, steps: int, shapes: Iterable[str], **changes: Any) -> Iterable[TrainingJob]:
        """All seeds, at the rate for this length."""
        for seed in SEEDS:
            for shape in self.ready(shapes):
                rate = rate_for(self.swept[shape], steps)
                yield job(shape, steps, Member(seed, rate, **{"weight_decay": DECAY, **changes}))


def read_record(file: Path) -> list[dict[str, Any]]:
    """Lines of three kinds: setting (one per call), run, and side by side."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def go_on(text: str, record: Path, seconds: float, say: Callable[[str], None], at_once: int | None = None) -> None:
    """Train what is left until the time is over; every run is appended to the record when it ends."""
    with TemporaryDirectory() as folder:
        raw = Path(folder) / "text"
        length = unpack(text, raw)
        before = read_record(record)
        runs = [x for x in before if x["kind"] == "run"]
        now = setting(text, raw, length)
        for key in ("text_sha256", "sizes", "batch", "shapes"):
            if before and before[0][key] != now[key]:
                raise DeadweightError(f"{record} was made with another {key}; expected the same: name another file")
        append(record, now)
        cuts = length * SPLIT[0] // 100, length * SPLIT[1] // 100

        def keep(done: TrainingJob, outcome: TimedCurve, beside: bool) -> None:
            runs.append(as_run(done, outcome, beside))
            append(record, runs[-1])

        setup = lambda name: WorkerSetup(config(name), Train(batch=BATCH), raw, cuts)  # noqa: E731
        agenda = Agenda(lambda: StudyPlan(runs).left(), setup, keep)
        queue = Queue(agenda, seconds=seconds, at_once=at_once, progress=say)
        queue.run()
        if queue.gains:
            append(record, {"kind": "side by side", "speed_over_one": sum(queue.gains)})


def unpack(text: str, raw: Path) -> int:
    read = read_text(text, print)
    check_text(read, text)
    raw.write_bytes(read)
    return len(read)


def setting(text: str, raw: Path, length: int) -> dict[str, Any]:
    """The settings that all runs of one call share."""
    return {
        "kind": "setting",
        "text": Path(text).name,
        "bytes": length,
        "text_sha256": hashlib.sha256(np.memmap(raw, dtype=np.uint8, mode="r")).hexdigest(),
        "split": list(SPLIT),
        "sizes": SIZES,
        "batch": BATCH,
        "shapes": {shape: counts(shape) for shape in SHAPES},
        **circumstances(),
    }


def counts(shape: str) -> dict[str, int]:
    """Weights, without the tables; and FLOPs of a step per token, forward and backward: 6 per weight of a matrix, the
    readout's too, and 12·d for each of the (context + 1)/2 tokens that a token sees on average, in each layer."""
    model = TransformerForCausalLM(TransformerConfig(**config(shape)))
    tables = model.transformer.tokens.weight.numel() + model.transformer.places.weight.numel()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.transformer.places.weight.numel()
    seen = SIZES["n_layers"] * SIZES["d_model"] * (SIZES["context"] + 1) // 2
    return {"non_embedding": model.num_parameters() - tables, "flops_per_token": 6 * matrices + 12 * seen}


def as_run(done: TrainingJob, outcome: TimedCurve, beside: bool) -> Run:
    curve = outcome.curve
    return {
        "kind": "run",
        "graph": done.graph,
        "steps": done.steps,
        "member": asdict(done.member),
        "judged_on": done.judged_on,
        "valid_loss": curve.valid_loss if math.isfinite(curve.valid_loss) else None,
        "diverged_at": curve.diverged_at,
        "tokens_per_second": round(outcome.tokens_per_second),
        "beside": beside,
        "gigabytes": None if outcome.gigabytes is None else round(outcome.gigabytes, 2),
        "at": list(curve.steps),
        "train_loss": [round(x, 5) for x in curve.train_loss],
        "seconds": [round(x, 2) for x in outcome.seconds],
    }
