"""The page of a compression: a coded cache or its curve, or smaller heads; what it costs."""

from __future__ import annotations

import math
from itertools import pairwise

from deadweight.compress.cache_result import CacheCompression, CurvePoint, outcome_line, perplexity_rise
from deadweight.compress.result import Compression, outcome
from deadweight.report.cache import COST_WORDS, cache_words, mean_bits, widths_of
from deadweight.report.html.page import byte_text, change_text
from deadweight.report.html.plots import HeatMap, LinePlot, heat_map, line_plot
from deadweight.report.html.report import Report, Section, Table, make_table, used
from deadweight.report.text import one_line
from deadweight.slim.format import CacheSpec

COLUMNS = 32  # of the picture of bits: coordinates are averaged in as many groups
LEAST_RISE = 1e-4  # of perplexity, on a logarithmic axis
NOT_THE_SAME = "This is not the same function; what it costs was measured on text that was held back."


def describe_compression(result: Compression | CacheCompression) -> Report:
    return describe_cache(result) if isinstance(result, CacheCompression) else describe_heads(result)


def describe_cache(c: CacheCompression) -> Report:
    before, after = c.bytes_per_token
    many = len(c.points) > 1
    name, judgement = next(iter(c.point.judgements.items()))
    rise = change_text(perplexity_rise(judgement))
    headline = (
        f"{len(c.points)} sizes of the key-value cache, measured"
        if many
        else f"{100 * c.point.share:.1f} % of the bytes of a 16\u2011bit cache, {rise} perplexity"
    )
    facts = [("text", name), ("calibrated on", f"{c.calibration_tokens:,} tokens"), ("time", f"{c.seconds:.0f} s")]
    if not many:
        cache = ("cache per token", f"{byte_text(before)} → {byte_text(after)}")
        facts = [cache, ("bits per number", f"{c.bits:.2f}"), *facts]
    healing = () if c.before_healing is None else (outcomes(c.before_healing, "before healing, "),)
    costs = (outcomes(c.point, ""),) if not many else ()
    sections = used(
        Section(title="Loss against size", line_plots=curve(c), table=curve_table(c)) if many else Section(title=""),
        Section(
            title="What it costs",
            prose=() if many else (COST_WORDS,),
            notes=tuple(line for part in (*healing, *costs) for line in part),
        ),
        Section(
            title="Where the bits went",
            prose=() if many else tuple(words for words in cache_words(c) if words != COST_WORDS),
            heat_maps=() if many else bits_maps(c),
            table=None if many else bits_table(c),
        ),
        Section(title="Notes", notes=tuple(map(one_line, c.notes))),
    )
    return Report("compress", c.model, headline, NOT_THE_SAME, tuple(facts), sections)


def outcomes(point: CurvePoint, prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{outcome_line(name, j)}" for name, j in point.judgements.items())


def curve(c: CacheCompression) -> tuple[LinePlot, ...]:
    shares = [100 * point.share for point in c.points]
    series = [
        (name, shares, [100 * max(perplexity_rise(p.judgements[name]), LEAST_RISE) for p in c.points])
        for name in c.point.judgements
    ]
    plot = line_plot(
        "Rise of perplexity (below 0.01 % drawn as 0.01 %)",
        series,
        x_label="bytes of a 16-bit cache (%)",
        y_label="rise of perplexity (%)",
        log="y",
    )
    return () if plot is None else (plot,)


def curve_table(c: CacheCompression) -> Table:
    head = ["share of 16 bits", "bits per number", *c.point.judgements]
    rows = [
        (
            f"{100 * p.share:.1f} %",
            f"{16 * p.share:.2f}",
            *(change_text(perplexity_rise(j)) for j in p.judgements.values()),
        )
        for p in c.points
    ]
    return make_table(head, rows, right=head, caption="rise of perplexity by size of the cache")


def bits_maps(c: CacheCompression) -> tuple[HeatMap, ...]:
    joint = all(spec.joint for spec in c.caches.values())
    sides = {"Bits of keys and values" if joint else "Bits of keys": False} | (
        {} if joint else {"Bits of values": True}
    )
    axes = ("coordinates, the costliest first,", "layer")
    return tuple(
        heat_map(title, [grouped_widths(s, values=values) for s in c.caches.values()], 0, 8, axes=axes, form=".0f")
        for title, values in sides.items()
    )


def grouped_widths(spec: CacheSpec, *, values: bool) -> list[float | None]:
    widths = widths_of(spec, values=values)
    edges = [i * len(widths) // COLUMNS for i in range(COLUMNS + 1)]
    groups = [widths[a:b] for a, b in pairwise(edges)]
    return [math.fsum(g) / len(g) if g else None for g in groups]


def bits_table(c: CacheCompression) -> Table:
    rows = [
        (
            path,
            f"{mean_bits(widths_of(spec, values=False)):.2f}",
            "with the keys" if spec.joint else f"{mean_bits(widths_of(spec, values=True)):.2f}",
            f"{spec.token_bytes:,}",
        )
        for path, spec in c.caches.items()
    ]
    head = ("attention", "key bits", "value bits", "bytes per token")
    return make_table(head, rows, right=head[1:], names=("attention",))


def describe_heads(c: Compression) -> Report:
    share = c.kv_after / max(1, c.kv_before)
    before = () if c.judgement_before_healing is None else (f"before healing: {outcome(c.judgement_before_healing)}",)
    left = tuple(f"left alone in {path}: {one_line(why)}" for path, why in c.left_alone.items())
    facts = (
        ("cache, numbers per token", f"{c.kv_before:,} → {c.kv_after:,}"),
        ("parameters", f"{c.parameters_before:,} → {c.parameters_after:,}"),
        ("layout", c.layout),
        ("calibrated on", f"{c.tokens:,} tokens"),
        ("time", f"{c.seconds:.0f} s"),
    )
    sections = used(
        Section(title="What it costs", notes=(*before, outcome(c.judgement))),
        Section(title="Kept dimensions", heat_maps=kept_maps(c), table=kept_table(c)),
        Section(title="Notes", notes=(*left, *map(one_line, c.notes))),
    )
    return Report(
        "compress", c.model, f"Smaller heads: {100 * share:.1f} % of the cache", NOT_THE_SAME, facts, sections
    )


def kept_maps(c: Compression) -> tuple[HeatMap, ...]:
    if not c.kept:
        return ()
    largest_key, largest_value = (float(max(sizes)) for sizes in zip(*c.head_sizes.values(), strict=True))
    sides = (
        ("Dimensions of keys", [k.keys for k in c.kept.values()], largest_key),
        ("Dimensions of values", [k.values for k in c.kept.values()], largest_value),
    )
    return tuple(
        heat_map(title, table, 0, largest, axes=("key head", "layer"), form=".0f") for title, table, largest in sides
    )


def kept_table(c: Compression) -> Table:
    rows = [
        (path, " ".join(map(str, k.keys)), f"{d_key:,}", " ".join(map(str, k.values)), f"{d_value:,}")
        for (path, k), (d_key, d_value) in zip(c.kept.items(), (c.head_sizes[path] for path in c.kept), strict=True)
    ]
    head = ("attention", "keys kept, by head", "of", "values kept, by head", "of")
    return make_table(head, rows, right=("of",), names=("attention",))
