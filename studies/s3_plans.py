"""Does a plan beat equal heads? Trained from scratch, at equal attention parameters, equal tokens, several seeds each.

Published (arXiv 2510.03784): early layers should share their budget by the error bound, later layers can shrink,
because softmax saturates. Here a transformer is trained with that plan, with equal heads of several sizes everywhere,
and with rivals that give heads or width to early layers, or to late ones. All plans have the same Σ heads × size over
the layers, hence the same number of parameters and the same KV cache.

*Plans of our own.* A pilot run (equal heads) is trained for a while. By *saturation*: the plan that
`deadweight allocate plan --saturation pilot` gives. By *need*: `deadweight compress --keep-attention 0.5` halves
the pilot's attention weights and measures what each layer's keys and values are worth; a layer's width is in proportion
to what it kept. (The record was made by an earlier version, which halved the cache.)

    python studies/s3_plans.py plans --text enwik8.xz --out studies/s3_plans.json       the pilot, and what follows
    python studies/s3_plans.py run --text enwik8.xz --out studies/s3_plans.json         trains what is not there yet
    python studies/s3_plans.py report studies/s3_plans.json --markdown docs/plans.md
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import byte_runs
import typer

from deadweight.allocate.constraints import Rules
from deadweight.allocate.pilot import PilotSettings, pilot
from deadweight.allocate.plan import UniformShape, plan
from deadweight.allocate.profile import read_profile
from deadweight.compress.run import compress
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, load_record, save_record
from deadweight.source.plain_text import read_text
from deadweight.train.ensemble import Ensemble, Member, train_together
from deadweight.transformer import TransformerConfig

app = typer.Typer(add_completion=False, help=__doc__)
SHAPE = UniformShape(256, 6, 4, 256)
RATE = 1.5e-3
Layers = list[tuple[int, int]]  # heads and their size
EQUAL = "equal heads, 4 × 64"
RIVALS: dict[str, Layers] = {
    EQUAL: [(4, 64)] * 6,
    "equal heads, 8 × 32": [(8, 32)] * 6,
    "equal heads, 16 × 16": [(16, 16)] * 6,
    "small heads early": [(16, 16), (16, 16), (8, 32), (8, 32), (4, 64), (4, 64)],
    "large heads early": [(4, 64), (4, 64), (8, 32), (8, 32), (16, 16), (16, 16)],
    "pyramid, wide early": [(n, 32) for n in (12, 11, 9, 7, 5, 4)],
    "pyramid, wide late": [(n, 32) for n in (4, 5, 7, 9, 11, 12)],
}
BOUND, SATURATED, NEED = "the bound", "the bound, and saturation", "measured need"


@app.command()
def plans(
    text: Annotated[str, typer.Option(help="A text file.")],
    out: OutOption,
    steps: Annotated[int, typer.Option(help="Steps of the pilot run.")] = 200,
) -> None:
    """Train a pilot, and write the plans to compare into the record."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"  # the pilot sees none of the bytes that plans are judged on
        read = read_text(text, print)
        file.write_bytes(read[: len(read) * 95 // 100][: 20 << 20])
        known = read_profile(f"text:{file}", None, "bytes", print)
        seen = pilot(SHAPE, PilotSettings(str(file), steps=steps), keep=Path(folder) / "pilot", progress=tell)
        small = compress(Path(folder) / "pilot", keep_attention=0.5, text=str(file), length=SHAPE.context)
    rules = Rules(multiple=8, one_size=True)
    made = {
        name: [(layer.heads, layer.size) for layer in own_plan.layers]
        for name, own_plan in {
            BOUND: plan(SHAPE, known.values, d_token=known.d_token, rules=rules),
            SATURATED: plan(SHAPE, known.values, d_token=known.d_token, saturation=seen.factors, rules=rules),
        }.items()
    }
    kept = [sum(k.keys) + sum(k.values) for k in small.kept.values()]
    made[NEED] = [(heads, 32) for heads in shares(kept, SHAPE.width // 32)]
    record = {
        "plans": RIVALS | made,
        "pilot": {
            "steps": steps,
            "bits_per_byte": seen.bits_per_byte,
            "factors": seen.factors,
            "kept": kept,
            "kept_of": "attention weights",
        },
        "profile": {"norms": known.values, "d_token": known.d_token},
        "curves": {},
        "setting": {"pilot": circumstances()},
    }
    save_record(out, record, indent=None)
    for name, layers in record["plans"].items():
        print(f"{name}: {words(layers)}")


def tell(what: str, done: int, of: int) -> None:
    if done in (1, of) or done % 50 == 0:
        print(f"{what}: {done} of {of}", flush=True)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Positive whole numbers with this sum, in proportion to the weights, by largest remainders."""
    exact = [1 + (total - len(weights)) * w / sum(weights) for w in weights]
    whole = [math.floor(x) for x in exact]
    for place in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: total - sum(whole)]:
        whole[place] += 1
    return whole


def config(layers: Layers) -> TransformerConfig:
    heads, sizes = [h for h, _ in layers], [d for _, d in layers]
    return TransformerConfig(
        d_model=SHAPE.d_model,
        n_layers=SHAPE.n_layers,
        context=SHAPE.context,
        vocab_size=256,
        heads=heads,
        key_heads=heads,
        d_qk=sizes,
        d_v=sizes,
    )


@app.command()
def run(
    text: byte_runs.TextOption,
    out: Annotated[Path, typer.Option(help="The record; plans that it has curves of are not repeated.")],
    steps: byte_runs.StepsOption = 2400,
    batch: byte_runs.BatchOption = 16,
    seeds: byte_runs.SeedsOption = 4,
    only: byte_runs.OnlyOption = None,
) -> None:
    """Train every plan, all its seeds together, and write the record."""
    record = load_record(out)
    tokens, train = byte_runs.read_bytes(text), byte_runs.train_settings(steps, batch)
    told = {"text": Path(text).name, "steps": steps, "batch": batch, "seeds": seeds, **circumstances()}
    record["setting"] = {"pilot": record["setting"]["pilot"], **told}
    for name in only or record["plans"]:
        if name in record["curves"]:
            continue
        print(name, flush=True)
        members = [Member(seed, RATE, 0.1) for seed in range(seeds)]
        layers = [(h, d) for h, d in record["plans"][name]]
        curves = train_together(Ensemble(config(layers), members, train), tokens, byte_runs.say)
        record["curves"][name] = [asdict(c) for c in curves]
        save_record(out, record, indent=None)


def words(layers: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{h} × {d}" for h, d in layers)


def bits(record: dict[str, Any], name: str) -> list[float]:
    return [c["valid_loss"] / math.log(2) for c in record["curves"][name]]


def against(record: dict[str, Any], name: str, other: str) -> tuple[float, float]:
    """The mean difference over seeds, which read the same batches, and its standard error."""
    pairs = [a - b for a, b in zip(bits(record, name), bits(record, other), strict=True)]
    return statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


def ranked(record: dict[str, Any]) -> list[str]:
    return sorted(record["curves"], key=lambda name: statistics.mean(bits(record, name)))


def written(record: dict[str, Any]) -> str:
    s, p = record["setting"], record["pilot"]
    lines = [
        "# Does a plan beat equal heads?",
        "",
        "This page tests whether heads that are planned layer by layer train better than equal heads. The published "
        "strategy (arXiv 2510.03784): allocate heads in early layers by the error bound, and make later layers "
        "smaller, because softmax saturates. `studies/s3_plans.py` trains such plans, equal heads and other plans.",
        "",
        "## Verdicts",
        "",
        *verdicts(record),
        "",
        "## Measurements",
        "",
        f"{SHAPE.n_layers} layers of width {SHAPE.d_model}, context {SHAPE.context}, bytes of {s['text']}, "
        f"{s['steps']:,} steps of {s['batch'] * SHAPE.context:,} bytes, learning rate {RATE:g}, {s['seeds']} seeds; "
        f"{s['machine']}, torch {s['torch']}. Every plan has a Σ heads × size of {SHAPE.width:,}: the same "
        "parameters, the same cache. Bits per byte of held-out text, mean ± standard deviation over seeds. The last "
        "column is the mean difference over pairs of the same seed, which see the same text, ± its standard error.",
        "",
        f"| plan, best first | heads × size, layer by layer | bits per byte | against {EQUAL} |",
        "| --- " * 4 + "|",
    ]
    for name in ranked(record):
        values = bits(record, name)
        difference, error = against(record, name, EQUAL)
        versus = "" if name == EQUAL else f"{difference:+.4f} ± {error:.4f}"
        mean = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
        lines.append(f"| {name} | {words(record['plans'][name])} | {mean} | {versus} |")
    factors = ", ".join(f"{f:.2f}" for f in p["factors"])
    kept = ", ".join(f"{k / sum(p['kept']):.0%}" for k in p["kept"])
    lines += [
        "",
        f"The pilot: equal heads, {p['steps']} steps, {p['bits_per_byte']:.3f} bits per byte. Its saturation factors "
        f"by layer: {factors}. Shares of the layers when `compress` keeps half of its {p.get('kept_of', 'cache')}: "
        f"{kept}.",
        "",
        "![plans](plans.svg)",
    ]
    return "\n".join(lines) + "\n"


def verdicts(record: dict[str, Any]) -> list[str]:
    """The verdicts: a difference counts if it exceeds two standard errors."""

    def said(name: str, other: str) -> str:
        difference, error = against(record, name, other)
        better = "better" if difference < -2 * error else "worse" if difference > 2 * error else "not distinguishable"
        return f"{better} ({difference:+.4f} ± {error:.4f})"

    have = record["curves"]
    published = next((n for n in (SATURATED, BOUND) if n in have), None)
    best, lines = ranked(record)[0], []
    if published is not None:
        difference, error = against(record, published, EQUAL)
        holds = "Holds here" if difference < -2 * error else "Not seen here"
        lines.append(f"- *The published strategy beats equal heads.* **{holds}**: {said(published, EQUAL)}.")
    for name in (BOUND, NEED):
        if name in have and name != published:
            lines.append(f"- {name[0].upper()}{name[1:]}, against {EQUAL}: {said(name, EQUAL)}.")
    equal = [n for n in have if n.startswith("equal heads")]
    favourite = min(equal, key=lambda n: statistics.mean(bits(record, n)))
    lines.append(
        f"- The best of all is *{best}*"
        + ("." if best == favourite else f": {said(best, favourite)} than {favourite}.")
    )
    if published is not None and favourite != EQUAL:
        lines.append(
            f"- Against the best of equal heads, {favourite}, the published strategy is {said(published, favourite)}."
        )
    return lines


def figure(record: dict[str, Any], file: Path) -> None:
    """Every plan's seeds, best first."""
    names = ranked(record)[::-1]
    picture, axes = pyplot().subplots(figsize=(7.5, 4.2), layout="constrained")
    for place, name in enumerate(names):
        values = bits(record, name)
        axes.scatter(values, [place] * len(values), s=18, color="C0")
        axes.scatter([statistics.mean(values)], [place], s=120, marker="|", color="C1")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("bits per byte, one dot per seed; the bar is their mean")
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
