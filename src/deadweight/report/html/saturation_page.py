"""The page of a saturation measurement: slopes of all heads, norms and logit ranges by length."""

from __future__ import annotations

from deadweight.report.html.plots import LinePlot, heat_map, line_plot
from deadweight.report.html.report import Report, Section, Table, make_table
from deadweight.report.saturation import conclusion, format_signed
from deadweight.report.text import one_line, plural
from deadweight.saturation.run import Saturation
from deadweight.saturation.slopes import VERDICTS

MEANING = (
    "The slope is that of the logarithm of the norm of the softmax Jacobian over the logarithm of the number of keys: "
    "−1 means that the head becomes less sensitive to its logits like 1/length, 0 that it stays as it is."
)


def describe_saturation(s: Saturation) -> Report:
    heads = [h for layer in s.layers for h in layer.heads]
    counts = [sum(h.verdict == v for h in heads) for v in VERDICTS]
    names = ("saturate, like 1/L", "in part", "stay flat", "grow")
    slopes = [[h.slope for h in layer.heads] for layer in s.layers]
    widest = max(map(len, slopes), default=0)
    table = [[row[i] if i < len(row) else None for i in range(widest)] for row in slopes]
    heat = heat_map("Slope of every head", table, -1, 1, axes=("head", "layer"), form="+.1f")
    plots = [plot for plot in (by_length(s, "norm"), by_length(s, "logit_range")) if plot is not None]
    lines = conclusion(s)
    return Report(
        "saturation",
        s.model,
        f"{counts[0]:,} of {plural(len(heads), 'head')} saturate with length",
        as_sentence(lines[-1]),
        tuple((name, f"{n:,}") for name, n in zip(names, counts, strict=True)),
        (
            Section(title="Heads", prose=(MEANING, as_sentence(lines[1])), heat_maps=(heat,)),
            Section(title="By length", line_plots=tuple(plots), prose=(as_sentence(lines[2]),)),
            Section(title="By layer", table=layer_table(s)),
            Section(title="Measured on", prose=(measured_on(s),), notes=tuple(map(one_line, s.notes))),
        ),
    )


def as_sentence(line: str) -> str:
    text = one_line(line)
    return f"{text[:1].upper()}{text[1:]}."


def measured_on(s: Saturation) -> str:
    return f"{s.text}: {plural(s.windows, 'window')} of {s.lengths[-1]:,} tokens, at most {s.rows} rows for each length"


def by_length(s: Saturation, field: str) -> LinePlot | None:
    """A line for each layer: the mean over its heads."""
    title, log = {"norm": ("Norm of the softmax Jacobian", "xy"), "logit_range": ("Logit range", "x")}[field]
    series = []
    for i, layer in enumerate(s.layers):
        lengths = [at.length for at in layer.heads[0].by_length]
        series.append((f"layer {i}", lengths, [layer.mean(field, place) for place in range(len(lengths))]))
    return line_plot(title, series, x_label="keys in the row", y_label="mean over heads", x_ticks=s.lengths, log=log)


def layer_table(s: Saturation) -> Table:
    first, last = f"{s.lengths[0]}", f"{s.lengths[-1]:,}"
    head = ["layer", "slope", "without first key", "1/L", "part", "flat", "grow"]
    head += [f"norm at {first}", f"norm at {last}", f"range at {last}", "factor"]
    rows = []
    for i, (layer, factor) in enumerate(zip(s.layers, s.factors, strict=True)):
        slopes = format_signed(layer.slope), format_signed(layer.rest_slope)
        norms = (f"{layer.mean('norm', place):.3g}" for place in (0, -1))
        counts = (f"{layer.count(v) or ''}" for v in VERDICTS)
        rows.append((f"{i}", *slopes, *counts, *norms, f"{layer.mean('logit_range'):.1f}", f"{factor:.2f}"))
    return make_table(head, rows, right=head, caption="slopes, norms and ranges by layer")
