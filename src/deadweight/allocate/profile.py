"""How much depends on each lag: assumed, read from a file, or measured. Only ratios matter for an optimum."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

from deadweight.allocate.bound import check_profile
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.printable import printable
from deadweight.source.type_aliases import JsonObject, Setting

FORMS = "flat, power:EXPONENT, exponential:LAGS, FILE.csv, FILE.json, text:FILE or model:MODEL"
MEASURED_LAGS = 32  # by default


@dataclass(frozen=True)
class Profile:
    """‖ρ_m‖ for m = 1, 2, …; m = 1 is the last token seen, the one right before the token to predict."""

    values: tuple[float, ...]
    source: str  # where it comes from, in words
    d_token: int | None = None  # how many dimensions the tokens have, where that was measured too


def power(exponent: float, lags: int) -> Profile:
    """‖ρ_m‖ = m^−exponent."""
    return Profile(tuple(m**-exponent for m in range(1, lags + 1)), f"power law, exponent {exponent:g}")


def exponential(decay: float, lags: int) -> Profile:
    """‖ρ_m‖ = e^(−(m−1)/decay)."""
    values = tuple(math.exp(-(m - 1) / decay) for m in range(1, lags + 1))
    return Profile(values, f"exponential, down to 1/e every {decay:g} lags")


def flat(lags: int) -> Profile:
    return Profile((1.0,) * lags, "flat profile")


def from_file(file: str | Path) -> Profile:
    """CSV with the columns lag and norm, or JSON: a list of numbers, or a list of those rows."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DeadweightError(f"{printable(file)} cannot be read ({why})") from error
    values = from_json(text, printable(file)) if path.suffix == ".json" else from_csv(text, printable(file))
    try:
        return Profile(check_profile(values), printable(path.name))
    except DeadweightError as error:
        raise DeadweightError(f"{printable(file)}: {error}") from error


def from_csv(text: str, where: str) -> list[float]:
    rows = csv.DictReader(text.splitlines())
    columns = [c.strip() for c in rows.fieldnames or []]
    rows.fieldnames = columns
    return in_order([row for row in rows if any(row.values())], columns, where)


def from_json(text: str, where: str) -> list[float]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DeadweightError(f"{where} is not valid JSON ({error})") from error
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        return in_order(data, list(data[0]), where)
    if not isinstance(data, list):
        raise DeadweightError(f"{where} holds {type(data).__name__}; expected a list of numbers, lag 1 first")
    return [number(value, where, f"lag {lag}") for lag, value in enumerate(data, 1)]


def in_order(rows: list[JsonObject], columns: list[str], where: str) -> list[float]:
    """The norms by lag. Every lag from 1 on must occur once."""
    if sorted(columns) != ["lag", "norm"]:
        shown = ", ".join(map(printable, columns)) or "none"
        raise DeadweightError(f"{where} has the columns {shown}; expected lag and norm")
    by_lag: dict[int, float] = {}
    for line, row in enumerate(rows, 1):
        lag = number(row.get("lag"), where, f"the lag of row {line}")
        if lag != int(lag) or lag < 1 or int(lag) in by_lag:
            raise DeadweightError(f"{where}: found lag {lag:g} in row {line}; expected 1, 2, 3, …, each once")
        by_lag[int(lag)] = number(row.get("norm"), where, f"lag {lag:g}")
    missing = next((lag for lag in range(1, len(by_lag) + 1) if lag not in by_lag), None)
    if missing is not None:
        raise DeadweightError(f"{where} has no lag {missing}; expected all from 1 to {max(by_lag)}, zeros written out")
    return [by_lag[lag] for lag in range(1, len(by_lag) + 1)]


def number(value: Setting, where: str, what: str) -> float:
    try:
        result = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DeadweightError(f"{where}: found {printable(repr(value))} for {what}; expected a number")
    return result


def read_profile(name: str, lags: int | None = None, tokenizer: str = "bytes", progress: Progress = silent) -> Profile:
    """A profile by its name: one of FORMS. `lags` is its length where the name leaves that open."""
    kind, colon, rest = name.partition(":")
    if kind in ("power", "exponential") and colon:
        value = number(rest, kind, "its number")
        if value < 0 or (kind == "exponential" and value == 0):
            raise DeadweightError(f"found {printable(name)}; expected a number above zero after the colon")
        return (power if kind == "power" else exponential)(value, lags or MEASURED_LAGS)
    if name == "flat":
        return flat(lags or 1)
    if kind == "text" and colon:
        from deadweight.allocate.profile_from_text import measure_text

        return measure_text(rest, lags or MEASURED_LAGS, tokenizer=tokenizer, progress=progress)
    if kind == "model" and colon:
        from deadweight.allocate.profile_from_model import measure_model

        return measure_model(rest, lags or MEASURED_LAGS, progress=progress)
    if Path(name).suffix in (".csv", ".json"):
        profile = from_file(name)
        return Profile(profile.values[:lags], profile.source)
    raise DeadweightError(f"found the profile {printable(name)}; expected {FORMS}")
