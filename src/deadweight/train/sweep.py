"""A sweep: its runs on this machine, or on a Ray cluster, and their results by variant."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason
from deadweight.train.grid import SweepRun
from deadweight.train.loop import train
from deadweight.train.settings import as_toml


@dataclass(frozen=True)
class RunResult:
    """The result of one run; `error` says why there is none."""

    variant: str
    seed: int
    parameters: int | None = None
    bits_per_byte: float | None = None
    valid_loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def sweep(
    runs: Sequence[SweepRun],
    out: str | Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    tell: Callable[[RunResult], None] = lambda _: None,
) -> list[RunResult]:
    """Run what has no result yet, so that a sweep that was stopped can be resumed. `tell` gets every result.

    On a Ray cluster OUT must be a folder that all its machines share.
    """
    folder = Path(out).expanduser().absolute()
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeadweightError(f"{printable(folder)} cannot be written ({reason(error)})") from error
    done = {run.folder: old for run in runs if (old := read_result_of(folder, run)) is not None}
    for old in done.values():
        tell(old)
    missing = [run for run in runs if run.folder not in done]
    for result, run in zip(execute(missing, folder, workers, ray), missing, strict=True):
        done[run.folder] = result
        tell(result)
    return [done[run.folder] for run in runs]


def execute(runs: Sequence[SweepRun], folder: Path, workers: int, ray: str | None) -> Iterator[RunResult]:
    """The results in the order of the runs."""
    if ray is not None:
        yield from on_ray(runs, folder, ray)
    elif workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(one, runs, itertools.repeat(folder))
    else:
        for run in runs:
            yield one(run, folder)


def on_ray(runs: Sequence[SweepRun], folder: Path, address: str) -> Iterator[RunResult]:
    try:
        import ray
    except ImportError as error:
        raise DeadweightError('a sweep on a cluster needs ray: pip install "deadweight[cluster]"') from error
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # no such cluster
        raise DeadweightError(f"no Ray cluster at {printable(address)} ({reason(error)})") from error
    try:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        remote = ray.remote(num_gpus=gpus, max_retries=2)(one)
        for reference in [remote.remote(run, folder) for run in runs]:
            yield ray.get(reference)
    finally:
        ray.shutdown()


def one(planned: SweepRun, folder: Path) -> RunResult:
    """Train one variant with one seed; a run that fails has a result too."""
    place = folder / "runs" / planned.folder
    (place / "result.json").unlink(missing_ok=True)  # of a run that failed before its first step
    result = RunResult(planned.variant, planned.seed)
    try:
        trained = train(planned.run, place, cache=folder / "data")
        result = replace(
            result,
            parameters=trained.parameters,
            bits_per_byte=trained.bits_per_byte,
            valid_loss=trained.valid_loss,
            tokens=trained.tokens,
            tokens_per_second=trained.tokens_per_second,
        )
    except DeadweightError as error:
        result = replace(result, error=str(error))
    except (RuntimeError, MemoryError) as error:  # out of memory, say: smaller ones may still fit
        result = replace(result, error=reason(error))
    place.mkdir(parents=True, exist_ok=True)
    (place / "result.json").write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    return result


def read_result_of(folder: Path, planned: SweepRun) -> RunResult | None:
    """The result of an earlier sweep, if the settings of the run are still the same."""
    place = folder / "runs" / planned.folder
    try:
        result = RunResult(**json.loads((place / "result.json").read_text(encoding="utf-8")))
        same = (place / "run.toml").read_text(encoding="utf-8") == as_toml(planned.run)
    except (OSError, ValueError, TypeError):
        return None
    if not same:
        raise DeadweightError(
            f"{printable(place)} was made with other settings; expected the same, another folder, or that run removed"
        )
    return result


@dataclass(frozen=True)
class VariantSummary:
    """One variant over its seeds."""

    variant: str
    parameters: int | None
    values: tuple[float, ...]  # bits per byte
    failed: int

    @property
    def mean(self) -> float:
        return statistics.mean(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def words(self) -> str:
        if not self.values:
            return "none finished"
        return f"{self.mean:.4f} ± {self.spread:.4f}" if len(self.values) > 1 else f"{self.mean:.4f}"


def summarise(results: Sequence[RunResult]) -> list[VariantSummary]:
    """One summary per variant, in order."""
    summaries = []
    for variant in dict.fromkeys(r.variant for r in results):
        mine = [r for r in results if r.variant == variant]
        values = tuple(r.bits_per_byte for r in mine if r.bits_per_byte is not None)
        size = next((r.parameters for r in mine if r.parameters is not None), None)
        summaries.append(VariantSummary(variant, size, values, len(mine) - len(values)))
    return summaries
