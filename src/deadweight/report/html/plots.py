"""Plots as data: coordinates that the templates draw as SVG. Colours come from the style sheet and follow the theme."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
STEPS = 9  # colours of a heat map


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Line:
    name: str
    points: str  # of an SVG polyline
    dots: tuple[tuple[float, float], ...]
    tone: int  # colour, 0 to 8


@dataclass(frozen=True)
class LinePlot:
    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def at(self, value: float) -> float:
        share = (self._of(value) - self._of(self.low)) / ((self._of(self.high) - self._of(self.low)) or 1.0)
        return round(self.start + share * (self.stop - self.start), 1)

    def _of(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self) -> list[float]:
        if not self.log:
            return linear_ticks(self.low, self.high)
        tens = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        return [10.0**n for n in tens] if len(tens) > 1 else [self.low, self.high]


def linear_ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    raw = (high - low) / 4 or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


Series = Sequence[tuple[str, Sequence[float], Sequence[float]]]  # name, x, y


def line_plot(
    title: str, series: Series, *, x_label: str, y_label: str, x_ticks: Sequence[float] | None = None, log: str = ""
) -> LinePlot | None:
    """Lines over one pair of axes; `log` names the logarithmic ones. None if there is nothing to draw."""
    kept = [(name, *finite(x, y, log)) for name, x, y in series]
    xs = [v for _, x, _ in kept for v in x]
    ys = [v for _, _, y in kept for v in y]
    if not xs:
        return None
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, "x" in log)
    y_axis = Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, "y" in log)
    lines = tuple(
        make_line(name, [(x_axis.at(a), y_axis.at(b)) for a, b in zip(x, y, strict=True)], i, len(kept))
        for i, (name, x, y) in enumerate(kept)
    )
    along_x = x_axis.ticks() if x_ticks is None else [t for t in x_ticks if t in xs]
    return LinePlot(
        title,
        x_label,
        y_label,
        tuple(Tick(x_axis.at(t), f"{t:,.4g}") for t in along_x),
        tuple(Tick(y_axis.at(t), f"{t:.3g}") for t in y_axis.ticks()),
        lines,
    )


def finite(x: Sequence[float], y: Sequence[float], log: str) -> tuple[list[float], list[float]]:
    """The points that an axis can show."""
    points = [
        (a, b)
        for a, b in zip(x, y, strict=True)
        if math.isfinite(a) and math.isfinite(b) and (a > 0 or "x" not in log) and (b > 0 or "y" not in log)
    ]
    return [a for a, _ in points], [b for _, b in points]


def make_line(name: str, points: list[tuple[float, float]], i: int, n: int) -> Line:
    tone = round(i * (STEPS - 1) / max(1, n - 1))
    return Line(name, " ".join(f"{a:g},{b:g}" for a, b in points), tuple(points), tone)


@dataclass(frozen=True)
class HeatMap:
    """Cells of one colour are one path: a table of 126 layers and 128 heads stays small."""

    title: str
    x_label: str
    y_label: str
    columns: int
    rows: int
    paths: tuple[tuple[int, str], ...]  # tone, and the path of all its cells
    low: str
    high: str
    diverging: bool


def heat_map(
    title: str, table: Sequence[Sequence[float | None]], low: float, high: float, *, axes: tuple[str, str], form: str
) -> HeatMap:
    """A cell for every number of a table of rows, its colour between `low` and `high`; None is left empty."""
    by_tone: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(table):
        tones = [None if v is None or not math.isfinite(v) else tone_of(v, low, high) for v in row]
        x = 0
        for tone, run in groupby(tones):
            n = len(list(run))
            if tone is not None:
                by_tone[tone].append(f"M{x} {y}h{n}v1h-{n}z")
            x += n
    first, last = (format(end, form).replace("-", "−") for end in (low, high))
    widest = max((len(row) for row in table), default=0)
    paths = tuple((tone, "".join(by_tone[tone])) for tone in sorted(by_tone))
    return HeatMap(title, *axes, widest, len(table), paths, first, last, diverging=low < 0 < high)


def tone_of(value: float, low: float, high: float) -> int:
    share = (min(max(value, low), high) - low) / ((high - low) or 1.0)
    return round(share * (STEPS - 1))
