"""A grid of variants and seeds from one file: local by default, on a Ray cluster when given its address."""

from __future__ import annotations

import copy
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from deadweight.errors import DeadweightError
from deadweight.source.kinds import Setting
from deadweight.source.text import printable, reason
from deadweight.train.loop import train
from deadweight.train.settings import Run, Table, known, make_run, read_toml

TABLES = ("model", "data", "train", "grid", "variant", "seeds")
Tell = Callable[["Outcome"], None]


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    variant: str
    seed: int
    run: Run

    @property
    def folder(self) -> str:
        plain = re.sub(r"[^a-z0-9.]+", "-", self.variant.lower()).strip("-") or "run"
        return f"{plain}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """How one run ended; `error` says why if it did not."""

    variant: str
    seed: int
    parameters: int | None = None
    bits_per_byte: float | None = None
    valid_loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def read_sweep(file: str | Path) -> list[Job]:
    """All runs of a sweep, each checked.

    The file holds [model], [data] and [train] as a run does, and what varies: seeds = […], [grid] with lists of values
    for "table.key" (every combination), and [[variant]] with a name and the keys that it changes.
    """
    return make_sweep(read_toml(file), where=f"{printable(file)}: ")


def make_sweep(tables: Mapping[str, Setting], where: str = "") -> list[Job]:
    known(tables, TABLES, "table", where)
    seeds = tables.get("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        raise DeadweightError(f"{where}found seeds = {seeds!r}; expected a list of whole numbers")
    if len(set(seeds)) < len(seeds):
        raise DeadweightError(f"{where}found seeds = {seeds!r}; expected different ones")
    for name in ("model", "data", "train", "grid"):
        if not isinstance(table := tables.get(name, {}), Mapping):
            raise DeadweightError(f"{where}found {name} = {table!r}; expected a table [{name}]")
    listed = tables.get("variant", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(v, Mapping) for v in listed):
        raise DeadweightError(f"{where}found variant = {listed!r}; expected tables [[variant]], one or more")
    base = {name: dict(tables.get(name, {})) for name in ("model", "data", "train")}
    result = [
        Job(name, seed, make_run(changed(base, {**changes, "train.seed": seed}, where), where=where))
        for name, changes in variants(tables, where)
        for seed in seeds
    ]
    names = [job.folder for job in result]
    if len(set(names)) < len(names):
        raise DeadweightError(f"{where}two variants have one name; expected different names")
    return result


def variants(tables: Mapping[str, Setting], where: str) -> Iterator[tuple[str, Table]]:
    grid = tables.get("grid", {})
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise DeadweightError(f"{where}found [grid] {printable(key)} = {values!r}; expected a list of values")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for number, variant in enumerate(tables.get("variant", [{}])):
        name = str(variant.get("name", "" if "variant" not in tables else f"variant {number + 1}"))
        own = {k: v for k, v in variant.items() if k != "name"}
        for chosen in combinations:
            words = [f"{key.partition('.')[2]} {value}" for key, value in chosen.items()]
            yield ", ".join([*([name] if name else []), *words]) or "run", {**own, **chosen}


def changed(base: dict[str, Table], changes: Mapping[str, Setting], where: str) -> dict[str, Table]:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        table, dot, name = key.partition(".")
        if not dot or table not in result:
            raise DeadweightError(f"{where}found {printable(key)}; expected table.key, as in train.weight_decay")
        result[table][name] = value
    return result


def sweep(
    jobs: Sequence[Job],
    out: str | Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    tell: Tell = lambda _: None,
) -> list[Outcome]:
    """Run what has no result yet; a sweep that was stopped goes on where it was.

    On a Ray cluster OUT must be a folder that all its machines share.
    """
    folder = Path(out).expanduser().absolute()
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeadweightError(f"{printable(folder)} cannot be written ({reason(error)})") from error
    done = {job.folder: old for job in jobs if (old := recorded(folder, job)) is not None}
    for old in done.values():
        tell(old)
    missing = [job for job in jobs if job.folder not in done]
    for outcome, job in zip(executed(missing, folder, workers, ray), missing, strict=True):
        done[job.folder] = outcome
        tell(outcome)
    return [done[job.folder] for job in jobs]


def executed(jobs: Sequence[Job], folder: Path, workers: int, ray: str | None) -> Iterator[Outcome]:
    """The outcomes in the order of the jobs."""
    if ray is not None:
        yield from on_ray(jobs, folder, ray)
    elif workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(one, jobs, itertools.repeat(folder))
    else:
        for job in jobs:
            yield one(job, folder)


def on_ray(jobs: Sequence[Job], folder: Path, address: str) -> Iterator[Outcome]:
    try:
        import ray
    except ImportError as error:
        raise DeadweightError("a sweep on a cluster needs ray: pip install deadweight[ray]") from error
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # no such cluster
        raise DeadweightError(f"no Ray cluster at {printable(address)} ({reason(error)})") from error
    try:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        remote = ray.remote(num_gpus=gpus, max_retries=2)(one)
        for reference in [remote.remote(job, folder) for job in jobs]:
            yield ray.get(reference)
    finally:
        ray.shutdown()


def one(job: Job, folder: Path) -> Outcome:
    """Train one variant with one seed; a run that fails is an outcome too."""
    place = folder / "runs" / job.folder
    (place / "result.json").unlink(missing_ok=True)  # of a run that failed before it began
    try:
        result = train(job.run, place, cache=folder / "data")
        outcome = Outcome(
            job.variant,
            job.seed,
            result.parameters,
            result.bits_per_byte,
            result.valid_loss,
            result.tokens,
            result.tokens_per_second,
        )
    except DeadweightError as error:
        outcome = Outcome(job.variant, job.seed, error=str(error))
    except (RuntimeError, MemoryError) as error:  # out of memory, say: the smaller ones may still fit
        outcome = Outcome(job.variant, job.seed, error=reason(error))
    place.mkdir(parents=True, exist_ok=True)
    (place / "result.json").write_text(json.dumps(outcome.__dict__) + "\n", encoding="utf-8")
    return outcome


def recorded(folder: Path, job: Job) -> Outcome | None:
    """The outcome of an earlier time, if the run is still the same."""
    from deadweight.train.settings import as_toml

    place = folder / "runs" / job.folder
    try:
        told = json.loads((place / "result.json").read_text(encoding="utf-8"))
        same = (place / "run.toml").read_text(encoding="utf-8") == as_toml(job.run)
    except (OSError, ValueError):
        return None
    if not same:
        raise DeadweightError(
            f"{printable(place)} was made with other settings; choose another folder, or remove that one"
        )
    return Outcome(**told)


@dataclass(frozen=True)
class Row:
    """A variant over its seeds."""

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


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row per variant, in order."""
    result = []
    for variant in dict.fromkeys(o.variant for o in outcomes):
        mine = [o for o in outcomes if o.variant == variant]
        values = tuple(o.bits_per_byte for o in mine if o.bits_per_byte is not None)
        size = next((o.parameters for o in mine if o.parameters is not None), None)
        result.append(Row(variant, size, values, len(mine) - len(values)))
    return result
