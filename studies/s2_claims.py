"""Verdicts of the query study on the published claims, from differences of pairs with equal seeds, at both sizes.

A difference is judged on three seeds or more, at equal tokens. A claim of equality
- *holds* if the whole 95 % interval of the difference is below MATTERS;
- is *not seen here* if the whole interval is above zero;
- is *not decided* if the interval reaches from no difference to more than that.
What holds at the small size, while the large one was not asked, *holds with conditions*. The larger size decides where
it has the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import s2_large as large
from paired import MATTERS, Bits, Difference, difference
from s2_large import Run

ASYMPTOTES = (0.0, 1.2)  # bits per byte that more text cannot undercut: the truth is taken to lie between
FIRST_LONG = 2400  # steps of the long runs of the first go


class Large:
    """The record of the large size, with its questions as methods."""

    def __init__(self, record: list[dict[str, Any]], pilot: list[dict[str, Any]]) -> None:
        self.settings = [x for x in record if x["kind"] == "setting"]
        self.runs: list[Run] = [x for x in record if x["kind"] == "run"]
        self.pilot: list[Run] = [x for x in pilot if x["kind"] == "run"]
        self.side_by_side: dict[int, float] = {}  # by bytes of a step
        for lines in (pilot, record):
            size = lines[0]["batch"] * lines[0]["sizes"]["context"]
            for told in (x for x in lines if x["kind"] == "side by side"):
                self.side_by_side[size] = told["speed_over_one"]
        self.shapes = self.settings[0]["shapes"]
        self.swept = {shape: large.sweep(self.runs, shape) for shape in large.SHAPES}

    def rate(self, shape: str, steps: int) -> float | None:
        """The best learning rate of the sweep; None while the sweep is unfinished."""
        swept = self.swept[shape]
        if large.rates_to_try(swept):
            return None
        return large.best_rate(swept) if steps == large.SHORT else large.rate_for(swept, steps)

    def bits(self, shape: str, steps: int, scale: float = 1.0, factor: float = 1.0) -> Bits:
        """Bits per byte of all seeds at the shape's own learning rate, or at a multiple of it."""
        rate = self.rate(shape, steps)
        wanted = None if rate is None else float(f"{rate * factor:.3g}")
        return {
            run["member"]["seed"]: large.loss_of(run) / math.log(2)
            for run in self.runs
            if large.shape_of(run) == shape
            and run["steps"] == steps
            and (run["member"]["learning_rate"], run["member"]["scale"]) == (wanted, scale)
            and (run["member"]["weight_decay"], run["member"]["learned_scale"]) == (large.DECAY, False)
        }

    def gap(self, shape: str, steps: int, other: str = "full") -> Difference | None:
        return difference(self.bits(shape, steps), self.bits(other, steps))

    def longest_gap(self, shape: str) -> tuple[int, Difference] | None:
        """The difference at the longest runs for which both shapes have three seeds."""
        gaps = [(n, d) for n in (large.SHORT, large.MIDDLE, large.LONG) if (d := self.gap(shape, n)) is not None]
        return gaps[-1] if gaps else None

    def half_scale(self, shape: str) -> Difference | None:
        return difference(self.bits(shape, large.SHORT, scale=0.5), self.bits(shape, large.SHORT))

    def flops(self, shape: str) -> float:
        """FLOPs per byte of text, relative to the full shape."""
        return self.shapes[shape]["flops_per_token"] / self.shapes["full"]["flops_per_token"]

    def speed(self, shape: str) -> float | None:
        """Bytes per second of a run alone on the GPU, with batches large enough to fill it."""
        speeds = [r["tokens_per_second"] for r in self.pilot if r["graph"] == shape and not r["beside"]]
        return statistics.median(speeds) if speeds else None

    def first_pair(self, shape: str) -> float | None:
        """The difference to the full shape in the single pair of long runs of the pilot."""
        ends = {r["graph"]: large.loss_of(r) / math.log(2) for r in self.pilot if r["steps"] >= FIRST_LONG}
        return ends[shape] - ends["full"] if {shape, "full"} <= ends.keys() else None

    def slope(self, steps: int) -> tuple[float, float]:
        """Bits per byte by which the full shape falls per e-fold of text there: a + b·text^−c through the means of its
        two shortest lengths, for the least and the largest asymptote a."""
        ends = [statistics.mean(self.bits("full", n).values()) for n in (large.SHORT, large.MIDDLE)]
        gone = math.log(large.MIDDLE / large.SHORT)
        slopes = []
        for a in ASYMPTOTES:
            power = math.log((ends[0] - a) / (ends[1] - a)) / gone
            slopes.append(power * (ends[0] - a) * (steps / large.SHORT) ** -power)
        return min(slopes), max(slopes)

    def worth(self, steps: int, less: float) -> tuple[float, float]:
        """How many bits per byte more text for the saved cost would gain: a lower and an upper estimate."""
        low, high = self.slope(steps)
        return -low * math.log(less), -high * math.log(less)


def verdict_of_equality(gap: Difference) -> str:
    if gap.is_worse:
        return "Not seen here"
    most = gap.mean + gap.margin
    return "Holds" if most < MATTERS else f"Not decided: worse by {most:.3f} at most"


def gain_at_optimum(swept: dict[float, float]) -> float:
    """Bits per byte that the vertex of the parabola predicts to gain over the best learning rate of the grid."""
    best = large.best_rate(swept)
    low, here, high = (swept.get(rate, math.inf) for rate in (best / 2, best, 2 * best))
    if not math.isfinite(low + high):
        return 0.0
    return (low - high) ** 2 / (8 * (low - 2 * here + high)) / math.log(2)


def millions(steps: int) -> str:
    return f"{steps * large.BATCH * large.SIZES['context'] / 1e6:.0f} M bytes"


def line(words: str, verdict: str, *said: str) -> str:
    return f"- *{words}* **{verdict}.** " + " ".join(s for s in said if s)


def identity(record: Large, shape: str, words: str, small: Mapping[str, Difference]) -> str:
    """One claim of equality with the full shape."""
    at_small = f"4.7 M parameters: {small[shape]}." if shape in small else ""
    longest = record.longest_gap(shape)
    if longest is None:
        verdict = only_small(verdict_of_equality(small[shape])) if shape in small else "Open"
        return line(words, verdict, at_small)
    steps, gap = longest
    shorter = record.gap(shape, large.SHORT) if steps != large.SHORT else None
    told = f"{shape} against full, 38 M parameters: {gap} after {millions(steps)} ({gap.seeds} seeds)"
    told += f", {shorter} after {millions(large.SHORT)}." if shorter else "."
    return line(words, verdict_of_equality(gap), told, caveats(record, shape, steps, gap), at_small)


def caveats(record: Large, shape: str, steps: int, gap: Difference) -> str:
    """How much a finer learning rate and equal FLOPs could change; neither is measured."""
    said = []
    finer = gain_at_optimum(record.swept[shape]) - gain_at_optimum(record.swept["full"])
    if steps == large.SHORT and finer > 0.001:
        said.append(f"A finer learning rate would recover about {finer:.3f} of it, by the parabola below.")
    if gap.mean > 0 and record.flops(shape) < 1:
        low, high = record.worth(steps, record.flops(shape))
        said.append(
            f"It takes {1 - record.flops(shape):.1%} fewer FLOPs per byte; more text for the same FLOPs would gain "
            f"about {low:.3f} to {high:.3f} (extrapolated, not measured)."
        )
    if (other := record.first_pair(shape)) is not None and (other > 0) != (gap.mean > 0):
        said.append(
            f"One pair of a first attempt, with other steps and rates, has the opposite sign ({other:+.4f}, see below)."
        )
    return " ".join(said)


def half_scale(record: Large, small: Mapping[str, Difference]) -> str:
    """Whether an identity projection works better with half the attention scale."""
    here = {shape: record.half_scale(shape) for shape in ("identity Q", "full")}
    listed = lambda found: ", ".join(f"{s} {d}" for s, d in found.items() if d is not None)  # noqa: E731
    deciding = here["identity Q"] or small["half scale, identity Q"]
    verdict = "Holds" if deciding.is_better else "Not seen here"
    before = {s.removeprefix("half scale, "): d for s, d in small.items() if s.startswith("half scale, ")}
    return line(
        "Identity queries need half the attention scale.",
        verdict,
        f"Half the scale against the full scale, after {millions(large.SHORT)} at 38 M parameters, at the learning "
        f"rate of the full scale: {listed(here)}."
        if any(here.values())
        else "",
        f"4.7 M parameters: {listed(before)}.",
    )


def at_small_size(words: str, names: Mapping[str, Difference], verdict: str, more: str = "") -> str:
    """A claim that was tested at the small size only."""
    listed = ", ".join(f"{name} {value}" for name, value in names.items())
    return line(words, only_small(verdict), f"{listed}{more}.")


def only_small(verdict: str) -> str:
    verdict = "Holds with conditions" if verdict == "Holds" else verdict
    return f"{verdict} (4.7 M parameters; open at 38 M)"


def holds(is_so: bool) -> str:
    return "Holds" if is_so else "Not seen here"


def claims(record: Large, small: Mapping[str, Difference], diverged: int) -> list[str]:
    """Every claim, its verdict, and the numbers behind it."""
    part = lambda prefix: {n.removeprefix(prefix): d for n, d in small.items() if n.startswith(prefix)}  # noqa: E731
    third, fast = part("third of the decay, "), part("four times the rate, ")
    smaller, larger = small["against a smaller MLP, identity Q"], small["identity V, larger MLP"]
    return [
        identity(record, "identity Q", "Query weights can be the identity.", small),
        identity(record, "identity K", "Key weights can be the identity.", small),
        identity(record, "identity V", "Value weights can be the identity.", small),
        identity(record, "identity Q, larger MLP", "Query weights are worth as much in the MLP.", small),
        half_scale(record, small),
        at_small_size(
            "Identity queries need a third of the weight decay, with which the baseline diverges.",
            third,
            holds(third["identity Q"].is_better and diverged > 0),
            f"; {diverged} runs diverged",
        ),
        at_small_size(
            "A model with as many weights removed from its MLP instead is no better.",
            {"identity Q against full, smaller MLP": smaller},
            verdict_of_equality(smaller),
        ),
        at_small_size(
            "Beyond the claims: value weights are better used in the MLP.",
            {"identity V, larger MLP against full": larger},
            holds(larger.is_better),
        ),
        at_small_size(
            "Beyond the claims: without query weights, training tolerates four times the learning rate better.",
            fast,
            holds(fast["full"].mean - fast["identity Q"].mean > math.hypot(*(d.margin for d in fast.values()))),
        ),
    ]
