"""`[tool.deadweight]` in pyproject.toml: what is checked, by which laws, what is accepted and why."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from deadweight.errors import DeadweightError
from deadweight.laws.page import law_codes
from deadweight.proof.verdict import Verdict
from deadweight.source.written_shapes import check_written

FILE, TABLE = "pyproject.toml", "[tool.deadweight]"
FORMATS = ("text", "json", "github", "sarif")
SHORTEST = 2  # tokens of an example
OUTPUTS = ("logits", "probabilities")
KINDS = {str: "a string", int: "a whole number", bool: "true or false"}
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A model to check, as the command line takes it, and how to audit it."""

    model: str  # package.module:callable, a folder, a config.json, a hub id
    inputs: str | None = None  # as after --inputs
    training: bool = False
    output: str = "logits"
    length: int | None = None
    complete: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Accepted:
    """Findings that are known and wanted: those of some laws (all, if none is named) about some parameters, and why."""

    parameter: str  # a name, or a pattern with *
    reason: str
    laws: tuple[str, ...] = ()  # codes


@dataclass(frozen=True)
class LintSettings:
    """Everything that a check needs to know."""

    targets: tuple[Target, ...] = ()
    select: tuple[str, ...] | None = None  # codes
    ignore: tuple[str, ...] | None = None
    accept: tuple[Accepted, ...] = ()
    fail_on: Verdict | None = None  # the mildest verdict that fails; None: not said
    baseline: Path | None = None
    output_format: str = "text"


def read_settings(folder: Path) -> LintSettings:
    """The settings of the project in this folder; the defaults where it has none."""
    file = folder / FILE
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        table = tomllib.loads(text).get("tool", {}).get("deadweight", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise DeadweightError(f"{file} cannot be read ({error}); expected TOML") from error
    except AttributeError as error:
        raise DeadweightError(f"found a value in place of a table in {file}; expected [tool.deadweight]") from error
    if not isinstance(table, Mapping):
        raise DeadweightError(f"found deadweight = {table!r} in [tool] of {file}; expected the table {TABLE}")
    return parse_settings(table, folder)


def parse_settings(table: Mapping[str, Any], folder: Path) -> LintSettings:
    """The settings in a table; raises for a key that does not exist and for a value of the wrong kind."""
    table = known_keys(table, LintSettings, TABLE)
    baseline = take(table, "baseline", str, TABLE)
    return LintSettings(
        targets=tuple(map(parse_target, listed(table, "targets"))),
        select=law_codes(words(table, "select")),
        ignore=law_codes(words(table, "ignore")),
        accept=tuple(map(parse_accepted, listed(table, "accept"))),
        fail_on=one_of(table, "fail_on", get_args(Verdict)),
        baseline=None if baseline is None else folder / baseline,
        output_format=one_of(table, "output_format", FORMATS) or "text",
    )


def parse_target(entry: object) -> Target:
    """A target: the model alone, or a table."""
    if isinstance(entry, str):
        return Target(entry)
    place = "targets of " + TABLE
    if not isinstance(entry, Mapping) or "model" not in entry:
        raise DeadweightError(f'found {entry!r} among {place}; expected {{ model = "package.module:callable" }}')
    table = known_keys(entry, Target, place)
    output = one_of(table, "output", OUTPUTS) or "logits"
    flags = {name: take(table, name, bool, place) or False for name in ("training", "complete", "trust_remote_code")}
    model, inputs = take(table, "model", str, place), take(table, "inputs", str, place)
    try:
        check_written(inputs)
    except DeadweightError as error:
        raise DeadweightError(f"in {place}: {error}") from error
    length = take(table, "length", int, place)
    if length is not None and length < SHORTEST:
        raise DeadweightError(f"found length = {length} in {place}; expected {SHORTEST} or more")
    return Target(str(model), inputs, output=output, length=length, **flags)


def parse_accepted(entry: object) -> Accepted:
    place = "accept of " + TABLE
    if not isinstance(entry, Mapping):
        raise DeadweightError(f"found {entry!r} in {place}; expected {{ parameter = …, laws = […], reason = … }}")
    table = known_keys(entry, Accepted, place)
    parameter, reason = take(table, "parameter", str, place), take(table, "reason", str, place)
    if not parameter or not reason or not reason.strip():
        raise DeadweightError(f"found {dict(entry)} in {place}; expected a parameter and the reason why it is accepted")
    return Accepted(parameter, reason, law_codes(words(table, "laws")) or ())


def known_keys(table: Mapping[str, Any], kind: type[Any], place: str) -> dict[str, Any]:
    """The table with _ for - in its keys; raises for a key that is no field of `kind`."""
    names = [field.name.replace("_", "-") for field in fields(kind)]
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
            raise DeadweightError(f"found {key!r} in {place}: {hint}")
    return {key.replace("-", "_"): value for key, value in table.items()}


def take(table: Mapping[str, Any], key: str, kind: type[T], place: str) -> T | None:
    value = table.get(key)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise DeadweightError(f"found {key.replace('_', '-')} = {value!r} in {place}; expected {KINDS[kind]}")
    return value


def one_of(table: Mapping[str, Any], key: str, choices: Sequence[str]) -> Any:
    value = table.get(key)
    if value is not None and value not in choices:
        raise DeadweightError(f"found {key.replace('_', '-')} = {value!r} in {TABLE}; expected {', '.join(choices)}")
    return value


def listed(table: Mapping[str, Any], key: str) -> list[object]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise DeadweightError(f"found {key} = {value!r} in {TABLE}; expected a list")
    return value


def words(table: Mapping[str, Any], key: str) -> list[str]:
    """A list of words, or one string with commas."""
    value = table.get(key, [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise DeadweightError(f"found {key} = {value!r} in {TABLE}; expected codes like DW002 or names of laws")
    return value
