"""Can a transformer do without its query weights? Trained from scratch, at equal tokens, several seeds each.

Published (arXiv 2510.23912): query weights can be the identity, which takes 25 % of the attention parameters; with
half the attention scale and a third of the weight decay the smaller model matches the baseline. There the scale and
the decay change together and each run has one seed. Here they are separated:

    {full, identity Q, identity K, identity V, identity Q with the parameters given to the MLP, full with as many fewer}
    × attention scale {1, 1/2} / √d × weight decay {0.1, 0.03125, 0} × seeds

and then the scale is learned, the keys are normed, and the learning rate is moved. All members of a shape are trained
together (deadweight.train.ensemble); members with one seed see the same text in the same order.

That is the small size, 4.7 M parameters. The large one, 38 M, is `s2_large.py` beside this file.

    python studies/s2_query_weights.py run --text enwik8.xz --out studies/s2_query_weights.json
    python studies/s2_query_weights.py large --text enwik8.xz --record studies/s2_large.jsonl --seconds 560
    python studies/s2_query_weights.py report studies/s2_query_weights.json --markdown docs/query-weights.md
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import s2_large
import typer

from deadweight.report.figure import pyplot, save
from deadweight.report.study import circumstances, show
from deadweight.train.data import check_text, read_text
from deadweight.train.ensemble import Member, train_together
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
    text: Annotated[str, typer.Option(help="a text file; the last twentieth is judged on")],
    out: Annotated[Path, typer.Option(help="where the record goes; what it has already is not run again")],
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 2400,
    batch: Annotated[int, typer.Option(help=f"sequences of {CONTEXT} bytes per step")] = 16,
    seeds: Annotated[int, typer.Option(help="seeds of every setting")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="shapes to run; default: all")] = None,
) -> None:
    """Train, and record."""
    read = read_text(text, print)
    check_text(read, text)
    tokens = np.frombuffer(read, dtype=np.uint8)
    cut = len(tokens) * 95 // 100
    train = Train(steps=steps, batch=batch, warmup=max(1, steps // 20), log_every=max(1, steps // 60))
    record = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"curves": {}}
    record["setting"] = setting(text, len(read), train, seeds)
    for shape in only or SHAPES:
        there = record["curves"].setdefault(shape, {"parameters": sizes(shape), "members": []})
        known = [c["member"] for c in there["members"]]
        missing = [m for m in members(shape, seeds) if asdict(m) not in known]
        if not missing:
            continue
        print(f"{shape}: {len(missing)} members", flush=True)
        say = lambda line: print(f"  {line}", flush=True)  # noqa: E731
        curves = train_together(config(shape), missing, train, tokens[:cut], tokens[cut:], say=say)
        there["members"] += [asdict(c) for c in curves]
        out.write_text(json.dumps(record), encoding="utf-8")


@app.command()
def large(
    text: Annotated[str, typer.Option(help="a text file; its last twentieth is not touched, the one before judges")],
    record: Annotated[Path, typer.Option(help="JSON lines: what is there already is not trained again")],
    seconds: Annotated[float, typer.Option(help="begin no run that would not end by then")] = math.inf,
    at_once: Annotated[int | None, typer.Option(help="runs that share the GPU; default: found by trying")] = None,
) -> None:
    """Train the large size, in order of what decides most, and record."""
    s2_large.go_on(text, record, seconds, lambda line: print(line, flush=True), at_once)


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
    """Members that differ in the seed alone, by (shape, scale, decay, learned, rate)."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for shape, told in record["curves"].items():
        for curve in told["members"]:
            m = curve["member"]
            found[shape, m["scale"], m["weight_decay"], m["learned_scale"], m["learning_rate"]].append(curve)
    return found


def words(curves: list[dict[str, Any]]) -> str:
    """Mean ± standard deviation, in bits per byte; what diverged is counted, not averaged."""
    values, lost = bits(curves), len(curves) - len(bits(curves))
    if not values:
        return f"diverged ({lost})"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}" + (f" ({lost} diverged)" if lost else "")


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="a record")],
    markdown: Annotated[Path | None, typer.Option(help="write the tables here, and the figure beside it")] = None,
) -> None:
    """Tables and a figure from a record."""
    show(file, tables, figure, markdown)


def best(record: dict[str, Any], shape: str) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
    """The setting of a shape with the lowest mean, among those in which every seed finished."""
    settings = {k: v for k, v in grouped(record).items() if k[0] == shape and len(bits(v)) == len(v)}
    return min(settings.items(), key=lambda item: statistics.mean(bits(item[1])))


def by_seed(record: dict[str, Any], shape: str) -> list[float]:
    """Bits per byte of every seed at scale 1/√d, the mean over all weight decays: they hardly matter, noise does."""
    rate, found = record["setting"]["learning_rate"], grouped(record)
    each = [bits(found[shape, 1.0, decay, False, rate]) for decay in DECAYS]
    return [statistics.mean(values) for values in zip(*each, strict=True)]


def gap(record: dict[str, Any], shape: str, other: str) -> tuple[float, float]:
    """The difference over pairs of the same seed, which saw the same text, and its standard error."""
    pairs = [a - b for a, b in zip(by_seed(record, shape), by_seed(record, other), strict=True)]
    return statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def claim(words: str, holds: str, found: str) -> str:
    return f"- *{words}* **{holds}.** {found}"


def matches(difference: float, error: float) -> str:
    return "Holds here" if difference <= 2 * error else "Not seen here"


def beats(difference: float, error: float) -> str:
    return "Holds here" if difference < -2 * error else "Not seen here"


def verdicts(record: dict[str, Any]) -> list[str]:
    """What the numbers say of each published claim, worked out from them."""
    found, rate, have = grouped(record), record["setting"]["learning_rate"], record["curves"]
    lines = [
        "## What it says of the claims",
        "",
        "Differences are at scale 1/√d, over pairs of the same seed (which saw the same text) after averaging over the "
        "weight decays, ± their standard error; a claim of equality holds here if a shape is not worse by more than "
        "two of them, a claim of more if it is better by more than two.",
        "",
    ]
    pairs = [
        ("identity Q", "full", matches, "Query weights can be the identity."),
        ("identity K", "full", matches, "So can key weights."),
        ("identity V", "full", matches, "So can value weights."),
        ("identity Q", "full, smaller MLP", matches, "A model that gives up as many weights of its MLP is no better."),
        ("identity Q, larger MLP", "full", matches, "Given to the MLP, the weights are worth as much as queries."),
        ("identity Q, key norm, larger MLP", "full", matches, "The same with normed keys."),
        ("identity V, larger MLP", "full", beats, "Beyond the claims: value weights are better spent in the MLP."),
    ]
    for shape, other, test, words in pairs:
        if shape in have and other in have:
            difference, error = gap(record, shape, other)
            told = f"{shape} against {other}: {difference:+.4f} ± {error:.4f} bits per byte."
            lines.append(claim(words, test(difference, error), told))

    def change(shape: str, scale: float, decay: float, factor: float = 1.0) -> float:
        """Against the same shape at scale 1, decay 0.1 and the plain learning rate."""
        base = mean_bits(found[shape, 1.0, 0.1, False, rate])
        return mean_bits(found[shape, scale, decay, False, rate * factor]) - base

    listed = lambda values: ", ".join(f"{s} {d:+.4f}" for s, d in values.items())  # noqa: E731
    half = {s: change(s, 0.5, 0.1) for s in have if (s, 0.5, 0.1, False, rate) in found}
    better = half.get("identity Q", 0.0) < 0
    lines.append(
        claim("It wants half the attention scale.", "Holds here" if better else "Not seen here", listed(half) + ".")
    )
    third = {s: change(s, 1.0, 0.03125) for s in have}
    lost = sum(c["diverged_at"] is not None for t in have.values() for c in t["members"])
    words = "It wants a third of the weight decay, with which the baseline diverges."
    lines.append(
        claim(words, "Not seen here" if not lost else "Some runs diverged", f"{listed(third)}; {lost} diverged.")
    )
    fast = {s: change(s, 1.0, 0.1, 4.0) for s in FURTHER if s in have}
    words = "Beyond the claims: without query weights, training bears four times the learning rate better."
    gentler = fast.get("identity Q", 0.0) < fast.get("full", 0.0)
    lines.append(claim(words, "Holds here" if gentler else "Not seen here", listed(fast) + "."))
    missing = [s for s in SHAPES if s not in have]
    if missing:
        lines += ["", f"Not run yet: {'; '.join(missing)}."]
    return [*lines, ""]


def mean_bits(curves: list[dict[str, Any]]) -> float:
    return statistics.mean(bits(curves)) if bits(curves) else math.nan


def tables(record: dict[str, Any]) -> str:
    s, found = record["setting"], grouped(record)
    rate = s["learning_rate"]
    lines = [
        "# Without query weights, trained from scratch",
        "",
        "Published (arXiv 2510.23912): the query weights can be the identity; with half the attention scale and a "
        "third of the weight decay the smaller model matches the baseline. Scale and decay changed together there, "
        "with one seed. `studies/s2_query_weights.py` separates them.",
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
            if (shape, scale, DECAYS[0], False, rate) not in found:
                continue
            cells = [words(found[shape, scale, d, False, rate]) for d in DECAYS]
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
            rates = [words(found[shape, 1.0, 0.1, False, rate * f]) for f in (0.5, 1.0, 2.0, 4.0)]
            lines.append(f"| {shape} | {words(found[shape, 1.0, 0.1, True, rate])} | " + " | ".join(rates) + " |")
    return "\n".join([*lines, "", *verdicts(record), "![best settings](query-weights.svg)"]) + "\n"


def figure(record: dict[str, Any], file: Path) -> None:
    """Best setting of every shape: each seed a dot, against the number of weights."""
    picture, axes = pyplot().subplots(figsize=(7.5, 4.2), layout="constrained")
    for place, (shape, told) in enumerate(record["curves"].items()):
        values = bits(best(record, shape)[1])
        x = told["parameters"]["non_embedding"] / 1e6
        axes.scatter([x] * len(values), values, label=shape, s=28, marker="osD^vPX*"[place % 8])
    axes.set_xlabel("non-embedding parameters, millions")
    axes.set_ylabel("bits per byte")
    axes.legend(fontsize=7)
    axes.set_title("Every shape at its best scale, decay and learning rate; one mark per seed", fontsize=9)
    save(picture, file)


if __name__ == "__main__":
    app()
