"""The runs of a sweep, from one file: every combination of variants, grid values and seeds."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable
from deadweight.source.type_aliases import Setting
from deadweight.train.settings import TABLES, Run, Table, check_names, make_run, read_toml

SWEEP_TABLES = (*TABLES, "grid", "variant", "seeds")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    variant: str
    seed: int
    run: Run

    @property
    def folder(self) -> str:
        plain = re.sub(r"[^a-z0-9.]+", "-", self.variant.lower()).strip("-") or "run"
        return f"{plain}-seed{self.seed}"


@dataclass(frozen=True)
class Variant:
    """A name, and the keys `table.key` that it changes."""

    name: str
    changes: Table


def read_sweep(file: str | Path) -> list[SweepRun]:
    """All runs of a sweep, each checked.

    The file holds [model], [data] and [train] as a run does, and what varies: seeds = […], [grid] with lists of values
    for "table.key" (every combination), and [[variant]] with a name and the keys that it changes.
    """
    return make_sweep(read_toml(file), where=f"{printable(file)}: ")


def make_sweep(tables: Mapping[str, Setting], where: str = "") -> list[SweepRun]:
    check_names(tables, SWEEP_TABLES, "table", where)
    for name in (*TABLES, "grid"):
        if not isinstance(table := tables.get(name, {}), Mapping):
            raise DeadweightError(f"{where}found {name} = {table!r}; expected a table [{name}]")
    base = {name: dict(tables.get(name, {})) for name in TABLES}
    seeds = check_seeds(tables.get("seeds", [0, 1, 2]), where)
    runs = [
        SweepRun(
            variant.name, seed, make_run(apply_changes(base, {**variant.changes, "train.seed": seed}, where), where)
        )
        for variant in combine(named_variants(tables, where), tables.get("grid", {}), where)
        for seed in seeds
    ]
    if len({run.folder for run in runs}) < len(runs):
        raise DeadweightError(f"{where}found two variants with the same name; expected different names")
    return runs


def check_seeds(seeds: Setting, where: str) -> list[int]:
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        raise DeadweightError(f"{where}found seeds = {seeds!r}; expected a list of whole numbers")
    if len(set(seeds)) < len(seeds):
        raise DeadweightError(f"{where}found seeds = {seeds!r}; expected every seed once")
    return seeds


def named_variants(tables: Mapping[str, Setting], where: str) -> list[Variant]:
    """The tables [[variant]], or a single variant without a name."""
    if "variant" not in tables:
        return [Variant("", {})]
    listed = tables.get("variant")
    if not isinstance(listed, list) or not listed or not all(isinstance(v, Mapping) for v in listed):
        raise DeadweightError(f"{where}found variant = {listed!r}; expected one or more tables [[variant]]")
    return [
        Variant(str(v.get("name", f"variant {number}")), {key: value for key, value in v.items() if key != "name"})
        for number, v in enumerate(listed, 1)
    ]


def combine(variants: Sequence[Variant], grid: Mapping[str, Setting], where: str) -> Iterator[Variant]:
    """Every variant with every combination of the values of the grid."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise DeadweightError(f"{where}found [grid] {printable(key)} = {values!r}; expected a list of values")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for variant, chosen in itertools.product(variants, combinations):
        words = [f"{key.partition('.')[2]} {value}" for key, value in chosen.items()]
        name = ", ".join([*([variant.name] if variant.name else []), *words]) or "run"
        yield Variant(name, {**variant.changes, **chosen})


def apply_changes(base: Mapping[str, Table], changes: Mapping[str, Setting], where: str) -> dict[str, Table]:
    """The tables with the values of `table.key` changed."""
    tables = copy.deepcopy(dict(base))
    for key, value in changes.items():
        table, dot, name = key.partition(".")
        if not dot or table not in tables:
            raise DeadweightError(f"{where}found {printable(key)}; expected table.key, as in train.weight_decay")
        tables[table][name] = value
    return tables
