"""Can a transformer do without its query weights? Trained from scratch, at equal tokens, several seeds each.

Published (arXiv 2510.23912): query weights can be the identity, which takes 25 % of the attention parameters; with
half the attention scale and a third of the weight decay the smaller model matches the baseline. There the scale and
the decay change together and each run has one seed. Here they are separated:

    {full, identity Q, identity K, identity V, identity Q with the parameters given to the MLP, full with as many fewer}
    × attention scale {1, 1/2} / √d × weight decay {0.1, 0.03125, 0} × seeds

and then the scale is learned, the keys are normed, and the learning rate is moved. All members of a shape are trained
together (deadweight.train.ensemble); members with one seed see the same text in the same order.

That is the small size, 4.7 M parameters. At 38 M, `s2_large.py` describes a first series; `large.py` goes on from it.

    python studies/s2_query_weights.py run --text enwik8.xz --out studies/s2_query_weights.json
    python studies/s2_query_weights.py report studies/s2_query_weights.json --large studies/s2_large.jsonl \\
        --pilot studies/s2_large_pilot.jsonl --markdown docs/query-weights.md
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import byte_runs
import s2_large
import typer
from paired import Difference
from s2_claims import Large, claims
from s2_pages import draw, open_points, section

from deadweight.report.figure import pyplot, save
from deadweight.report.record import PageOption, circumstances, load_record, save_record, show_record
from deadweight.train.ensemble import Ensemble, Member, train_together
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

app = typer.Typer(add_completion=False, help=__doc__)
WIDTH, LAYERS, HEADS, CONTEXT, RATE = 256, 6, 4, 256, 1.5e-3
SCALES, DECAYS = (1.0, 0.5), (0.1, 0.03125, 0.0)
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "identity Q": {"query": "identity"},
    "identity K": {"key": "identity"},
    "identity V": {"value": "identity"},
    "identity Q, larger MLP": {"query": "identity", "hidden": 9 * WIDTH // 2},
    "full, smaller MLP": {"hidden": 7 * WIDTH // 2},
    "identity V, larger MLP": {"value": "identity", "hidden": 9 * WIDTH // 2},
    "identity Q, key norm": {"query": "identity", "key_norm": True},
    "identity Q, key norm, larger MLP": {"query": "identity", "key_norm": True, "hidden": 9 * WIDTH // 2},
}
FURTHER = ("full", "identity Q", "identity Q, larger MLP")  # also with a learned scale and other learning rates
ONE_SCALE = ("identity V, larger MLP", "identity Q, key norm, larger MLP")  # half the scale is worse for all others


def members(shape: str, seeds: int) -> list[Member]:
    scales = SCALES[:1] if shape in ONE_SCALE else SCALES
    grid = [Member(s, RATE, d, c) for c in scales for d in DECAYS for s in range(seeds)]
    if shape in FURTHER:
        grid += [Member(s, RATE, 0.1, 1.0, learned_scale=True) for s in range(seeds)]
        grid += [Member(s, RATE * f, 0.1, 1.0) for f in (0.5, 2.0, 4.0) for s in range(seeds)]
    return grid


def config(shape: str) -> TransformerConfig:
    sizes = {"d_model": WIDTH, "n_layers": LAYERS, "heads": HEADS, "context": CONTEXT, "vocab_size": 256}
    return TransformerConfig(**{**sizes, **SHAPES[shape]})


@app.command()
def run(
    text: byte_runs.TextOption,
    out: Annotated[Path, typer.Option(help="The record; runs that it holds are not repeated.")],
    steps: byte_runs.StepsOption = 2400,
    batch: byte_runs.BatchOption = 16,
    seeds: byte_runs.SeedsOption = 3,
    only: byte_runs.OnlyOption = None,
) -> None:
    """Train all shapes, and write the record."""
    tokens, train = byte_runs.read_bytes(text), byte_runs.train_settings(steps, batch)
    record = load_record(out) or {"curves": {}}
    record["setting"] = setting(text, len(tokens.train) + len(tokens.valid), train, seeds)
    for shape in only or SHAPES:
        there = record["curves"].setdefault(shape, {"parameters": sizes(shape), "members": []})
        known = [c["member"] for c in there["members"]]
        missing = [m for m in members(shape, seeds) if asdict(m) not in known]
        if not missing:
            continue
        print(f"{shape}: {len(missing)} members", flush=True)
        curves = train_together(Ensemble(config(shape), missing, train), tokens, byte_runs.say)
        there["members"] += [asdict(c) for c in curves]
        save_record(out, record, indent=None)


def setting(text: str, size: int, train: Train, seeds: int) -> dict[str, Any]:
    return {
        "text": Path(text).name,
        "bytes": size,
        "steps": train.steps,
        "batch": train.batch,
        "context": CONTEXT,
        "warmup": train.warmup,
        "learning_rate": RATE,
        "seeds": seeds,
        **circumstances(),
    }


def sizes(shape: str) -> dict[str, int]:
    model = TransformerForCausalLM(config(shape))
    tables = model.transformer.tokens.weight.numel() + model.transformer.places.weight.numel()
    return {"all": model.num_parameters(), "non_embedding": model.num_parameters() - tables}


def bits(curves: list[dict[str, Any]]) -> list[float]:
    return [
        c["valid_loss"] / math.log(2) for c in curves if c["diverged_at"] is None and math.isfinite(c["valid_loss"])
    ]


def grouped(record: dict[str, Any]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Members that differ only in the seed, by (shape, scale, decay, learned, rate)."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for shape, told in record["curves"].items():
        for curve in told["members"]:
            m = curve["member"]
            groups[shape, m["scale"], m["weight_decay"], m["learned_scale"], m["learning_rate"]].append(curve)
    return groups


def words(curves: list[dict[str, Any]]) -> str:
    """Mean ± standard deviation, in bits per byte; runs that diverged are counted, not averaged."""
    values, lost = bits(curves), len(curves) - len(bits(curves))
    if not values:
        return f"diverged ({lost})"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}" + (f" ({lost} diverged)" if lost else "")


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="The record of the small size.")],
    large_file: Annotated[Path, typer.Option("--large", help="The record of the large size.")],
    pilot: Annotated[Path, typer.Option(help="A record with the speed of each shape alone on the GPU.")],
    markdown: PageOption = None,
) -> None:
    """The page and the figure of both records."""
    at_scale = read_large(large_file, pilot)
    show_record(
        file, lambda record: page(record, at_scale), lambda record, out: figure(record, at_scale, out), markdown
    )


def read_large(file: Path, pilot: Path) -> Large:
    return Large(s2_large.read_record(file), s2_large.read_record(pilot))


def by_seed(record: dict[str, Any], shape: str) -> list[float]:
    """Bits per byte of every seed at scale 1/√d, averaged over the weight decays, which differ less than seeds do."""
    rate, groups = record["setting"]["learning_rate"], grouped(record)
    each = [bits(groups[shape, 1.0, decay, False, rate]) for decay in DECAYS]
    return [statistics.mean(values) for values in zip(*each, strict=True)]


def small_gap(record: dict[str, Any], shape: str, other: str) -> Difference:
    """The difference of two shapes, averaged over the weight decays."""
    return paired(by_seed(record, shape), by_seed(record, other))


def paired(one: list[float], other: list[float]) -> Difference:
    pairs = [a - b for a, b in zip(one, other, strict=True)]
    return Difference(statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def small_differences(record: dict[str, Any]) -> dict[str, Difference]:
    """The differences of the small size that the claims need, by name; without runs that are missing or diverged."""
    groups, rate, have = grouped(record), record["setting"]["learning_rate"], record["curves"]
    gaps = {s: small_gap(record, s, "full") for s in have if s != "full"}
    if "full, smaller MLP" in have:
        name = "against a smaller MLP, identity Q"
        gaps[name] = small_gap(record, "identity Q", "full, smaller MLP")
    changes = {
        "half scale": (0.5, 0.1, False, rate),
        "third of the decay": (1.0, 0.03125, False, rate),
        "four times the rate": (1.0, 0.1, False, 4 * rate),
    }
    for change, key in changes.items():
        for shape in have:
            one, base = bits(groups[shape, *key]), bits(groups[shape, 1.0, 0.1, False, rate])
            if one and len(one) == len(base):
                gaps[f"{change}, {shape}"] = paired(one, base)
    return gaps


INTRODUCTION = """\
# Without query weights, trained from scratch

This page tests whether a transformer can be trained from scratch without query weights. The published claim (arXiv
2510.23912): the query weights can be the identity; with half the attention scale and a third of the weight decay the
smaller model matches the baseline. There, scale and decay were changed together, with one seed.
`studies/s2_query_weights.py` trains each change separately, with three seeds, at 4.7 M parameters (one learning rate
for all shapes) and at 38 M (the learning rate is swept for every shape that is judged).

## Verdicts

Differences are in bits per byte of held-out text at equal tokens; positive is worse. They are means over pairs of one
seed, which saw the same text in the same order, ± their standard error. With three seeds a 95 % interval is ± 4.3
standard errors. A claim of equality *holds* if the whole interval is below 0.005. It is *not seen here* if the whole
interval is above zero. It is *not decided* if the interval contains zero and reaches beyond 0.005. A claim that holds
at 4.7 M parameters and was not tested at 38 M *holds with conditions*; otherwise the larger size decides. These rules
were set after the runs. Errors are over seeds, at one learning rate per shape; they do not include the choice of the
rate.
"""
CAPTION = """
![differences to full at both sizes, and identity Q against full while they train](query-weights.svg)

Left: every shape against full. Right: identity Q against full, three pairs of seeds (bars: two standard errors), at
equal bytes, FLOPs and seconds. At equal FLOPs or seconds identity Q is further along its learning-rate schedule, which
makes it look better towards the end.
"""


def page(record: dict[str, Any], at_scale: Large) -> str:
    """The whole page: claims first, then what was measured at either size."""
    diverged = sum(c["diverged_at"] is not None for told in record["curves"].values() for c in told["members"])
    said = claims(at_scale, small_differences(record), diverged)
    lines = [INTRODUCTION, *said, CAPTION, *section(at_scale), *small_tables(record), *open_points(at_scale)]
    return "\n".join(lines).rstrip("\n") + "\n"


def small_tables(record: dict[str, Any]) -> list[str]:
    s, groups = record["setting"], grouped(record)
    rate = s["learning_rate"]
    lines = [
        "## 4.7 M parameters",
        "",
        f"{LAYERS} layers, {HEADS} heads of {WIDTH // HEADS}, context {s['context']}, bytes of {s['text']}, "
        f"{s['steps']:,} steps of {s['batch'] * s['context']:,} bytes, learning rate {rate:g}, {s['seeds']} seeds; "
        f"{s['machine']}, torch {s['torch']}. Bits per byte of held-out text, mean ± standard deviation over seeds.",
        "",
        "| shape | non-embedding | scale | " + " | ".join(f"decay {d:g}" for d in DECAYS) + " |",
        "| --- " * (3 + len(DECAYS)) + "|",
    ]
    for shape, told in record["curves"].items():
        for scale in SCALES:
            if (shape, scale, DECAYS[0], False, rate) not in groups:
                continue
            cells = [words(groups[shape, scale, d, False, rate]) for d in DECAYS]
            name = {1.0: "1/√d", 0.5: "1/(2√d)"}[scale]
            lines.append(f"| {shape} | {told['parameters']['non_embedding']:,} | {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Scale learned per head, and other learning rates (decay 0.1, scale 1/√d):",
        "",
        "| shape | learned scale | rate × 0.5 | × 1 | × 2 | × 4 |",
        "| --- " * 6 + "|",
    ]
    for shape in FURTHER:
        if shape in record["curves"]:
            rates = [words(groups[shape, 1.0, 0.1, False, rate * f]) for f in (0.5, 1.0, 2.0, 4.0)]
            lines.append(f"| {shape} | {words(groups[shape, 1.0, 0.1, True, rate])} | " + " | ".join(rates) + " |")
    return [*lines, ""]


def figure(record: dict[str, Any], at_scale: Large, file: Path) -> None:
    picture, axes = pyplot().subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    draw(axes, at_scale, {s: d for s, d in small_differences(record).items() if s in record["curves"]})
    save(picture, file)


if __name__ == "__main__":
    app()
