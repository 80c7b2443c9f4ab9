"""How fast a slim model decodes beside its original, where the cache is most of what is read; and the kernel alone.

python benchmarks/decode.py run MODEL SLIM --json benchmarks/results/decode.json
python benchmarks/decode.py run --config LLaMA-1B --keep-kv 0.5 --json benchmarks/results/decode.json
python benchmarks/decode.py kernel --json benchmarks/results/decode.json [--tune --shapes LLaMA-1B]
python benchmarks/decode.py report benchmarks/results/decode.json --markdown docs/decode.md

A step is one token for every row of the batch, from a cache of random numbers that is full from the start, captured as
a CUDA graph for all rivals alike. All are timed in turns; the median over the turns counts. The original is given the
attentions of torch too that take no mask, on a cache that is exactly as long as it is filled. The longest context is
found by trying.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from decode_parts import (
    COMPILED,
    CONFIGS,
    CUDA,
    DEVICE,
    DTYPE,
    RIVALS,
    Kind,
    Rival,
    Step,
    cache_bytes,
    cleaned,
    in_turns,
    loaded,
    longest,
    random_model,
    sharing,
    slim_twin,
)
from rich.console import Console

from deadweight.report.record import circumstances
from deadweight.slim import attention as slim_attention

app = typer.Typer(pretty_exceptions_enable=False)
Record = dict[str, Any]
BEST = ("original, our kernel", "slim, our kernel", "slim with late keys, our kernel")  # of the longest contexts
USUAL = RIVALS[0].name
FORMS = {"all": "all", "half": "half", "late": "half, late keys"}
WORDS = """\
## Again

`decode.py run --config LLaMA-1B --shapes 64x16384,64x8192,96x16384 --compiled 64x16384,64x8192`, `kernel`, and
`run --config SmolLM2-135M --like OUT/config.json --like-late LATE/config.json --shapes 256x8192 --fit 64` (OUT, LATE:
what `compress --keep-kv 0.5` gave, without and with `--late`), each with `--json FILE`; then `report FILE`. The last
was stopped while it looked for the longest context with late keys. *Compiled* is torch.compile of the whole step, for
original and slim model alike; against the best original means the best that is compiled too. SmolLM2 compiled is not
here: its thirty layers of different sizes took more than the five minutes that it was given."""
TUNED = {"tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4), "per processor": (1, 2, 4)}


def kept(file: Path | None, record: Record) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def opened(file: Path | None) -> Record:
    """What was recorded before; other parts of it stay."""
    found = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {}
    return {"speed": [], "longest": [], "kernel": [], **found, "setting": circumstances()}


def captured(rivals: Any, models: dict[Kind, Any], batch: int, context: int, filled: int) -> tuple[dict, dict]:
    """The steps of all rivals that can, and what the cache of each kind of model holds.

    All that compute with the same model and cache must come to the same logits.
    """
    states: dict[Kind, Any] = {kind: {} for kind in models}
    steps = {}
    logits: dict[Kind, Any] = {}
    for rival in rivals:
        step = Step(rival, models[rival.kind], batch, context, filled, states[rival.kind])
        try:
            found = step.eager().float()
            wanted = logits.setdefault(rival.kind, found)
            difference = float((found - wanted).norm() / wanted.norm())
            before = torch.cuda.memory_allocated() if CUDA else 0
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            step.eager()
            working = torch.cuda.max_memory_allocated() - before if CUDA else 0
            told = {"working_gigabytes": working / 1e9, "difference": difference}
            steps[rival.name] = (step.capture() if CUDA else step, told)
        except RuntimeError as error:  # out of memory, or no such attention for these shapes
            typer.echo(f"{rival.name}: left out ({str(error).splitlines()[0][:120]})")
        cleaned()
    return steps, states


def speed(
    name: str, models: dict[Kind, Any], shape: str, turns: int, filled: float, rivals: Sequence[Rival] = RIVALS
) -> list[Record]:
    batch, context = map(int, shape.split("x"))
    tokens = max(1, round(filled * context))
    rivals = [r for r in rivals if r.kind in models]
    with torch.no_grad():
        steps, states = captured(rivals, models, batch, context, tokens)
    times = in_turns({n: step.run for n, (step, _) in steps.items()}, turns)
    rows = []
    for rival in rivals:
        if rival.name not in steps:
            continue
        size = cache_bytes(states[rival.kind])
        row = {
            "model": name,
            "batch": batch,
            "context": context,
            "filled": tokens,
            "rival": rival.name,
            "milliseconds": times[rival.name] * 1e3,
            "tokens_per_second": batch / times[rival.name],
            "bytes_per_token": size / batch / context,
            "cache_gigabytes": size / 1e9,
            "cache_read_per_second": size * tokens / context / times[rival.name],
            **steps[rival.name][1],
        }
        rows.append(row)
        typer.echo(
            f"{name}, {batch} × {context:,}, {rival.name}: {row['milliseconds']:.3f} ms, "
            f"{row['tokens_per_second']:,.0f} tokens/s, {row['bytes_per_token']:,.0f} bytes per token, "
            f"{row['cache_read_per_second'] / 1e12:.2f} TB/s of cache, logits differ by {row['difference']:.1e}"
        )
    return rows


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(help="folder of the original")] = None,
    slim: Annotated[str | None, typer.Argument(help="folder of the compressed model")] = None,
    late: Annotated[str | None, typer.Option(help="folder of one with late keys")] = None,
    config: Annotated[str, typer.Option(help="random weights instead: a name of CONFIGS or a file")] = "LLaMA-1B",
    keep_kv: Annotated[float, typer.Option(help="share that a random slim model keeps")] = 0.5,
    like: Annotated[
        str | None, typer.Option(help="config.json of a compressed model: a random one of its sizes")
    ] = None,
    like_late: Annotated[str | None, typer.Option(help="the same of one with late keys")] = None,
    shapes: Annotated[str, typer.Option(help="batch x context, by comma")] = "16x8192,64x8192,64x16384,96x16384",
    filled: Annotated[float, typer.Option(help="share of the cache that is filled; a mask hides the rest")] = 1.0,
    turns: Annotated[int, typer.Option(help="turns of every rival")] = 5,
    compiled: Annotated[str, typer.Option(help="of the shapes, those that are decoded by torch.compile too")] = "",
    fit: Annotated[int, typer.Option(help="batch whose longest context is looked for; 0: none")] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    """Decode with all rivals, in turns."""
    torch.manual_seed(0)
    record = opened(json_file)
    name = Path(model).name if model is not None else f"{config}, sizes as compressed" if like else config
    original = random_model(config) if model is None else loaded(model)
    models: dict[Kind, Any] = {"original": original}
    with torch.no_grad():
        if model is None:
            models["slim"] = slim_twin(original, keep_kv, False, like)
            models["late"] = slim_twin(original, keep_kv, True, like_late)
    if slim is not None:
        models["slim"] = loaded(slim)
    if late is not None:
        models["late"] = loaded(late)
    record["speed"] = [r for r in record["speed"] if r["model"] != name]
    for shape in shapes.split(","):
        rivals = (*RIVALS, *COMPILED) if shape in compiled.split(",") else RIVALS
        record["speed"] += speed(name, models, shape, turns, filled, rivals)
        kept(json_file, record)
        cleaned()
    if not (fit and CUDA):
        return
    per_token = {r["rival"]: r["bytes_per_token"] for r in record["speed"] if r["model"] == name}
    record["longest"] = [r for r in record["longest"] if r["model"] != name]
    for rival in [r for r in RIVALS if r.name in BEST and r.name in per_token]:
        for kind, one in models.items():
            one.to(DEVICE if kind == rival.kind else "cpu")
        found = longest(rival, models[rival.kind], fit, per_token[rival.name])
        record["longest"].append({"model": name, "batch": fit, "rival": rival.name, "context": found})
        typer.echo(f"{name}, batch {fit}, {rival.name}: {found:,} tokens fit")
        kept(json_file, record)


def kernel_shapes() -> dict[str, tuple[int, int, int]]:
    """Query heads, key heads and their size."""
    return {
        n: (c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"])
        for n, c in CONFIGS.items()
    }


def kernel_case(
    h: int, g: int, d: int, batch: int, context: int, form: str, masked: bool, merge: int
) -> tuple[Any, ...]:
    """Arguments of one attention: whole heads, or half of the keys and values that neighbouring heads share."""
    whole, late = form == "all", form == "late"
    shared = 1 if whole else merge or sharing(g, d, late)
    size = shared * d // (1 if whole else 2)
    sizes = (size,) * (g // shared)
    key, value = (torch.randn(batch, len(sizes), context, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    query = torch.randn(batch, h, 1, d if late else size, device=DEVICE, dtype=DTYPE)
    mask = torch.ones(batch, 1, 1, context, dtype=torch.bool, device=DEVICE) if masked else None
    turning = []
    if late:
        maps = torch.randn(len(sizes) * shared * d * size, device=DEVICE, dtype=DTYPE) / size**0.5
        shift = torch.randn(len(sizes), shared, d, device=DEVICE, dtype=DTYPE)
        places = torch.arange(d, dtype=torch.int32, device=DEVICE)
        rates = 10000.0 ** (-torch.arange(d // 2, device=DEVICE) / (d // 2))
        turning = [maps, shift, places, rates, torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)]
    return query, key, value, mask, None, turning, sizes, sizes, d**-0.5


def replayed(job: Any) -> Any:
    """Ten runs as one graph: the time of a launch is not that of the kernel."""
    if not CUDA:
        return job
    job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            job()
    return graph.replay


def copy_speed() -> float:
    """Bytes read and written in a second by a copy: what memory gives."""
    size = 1 << 30 if CUDA else 1 << 22
    a, b = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    return 2 * size / in_turns({"": lambda: b.copy_(a)}, 5)[""]


def plans(code: Any, case: tuple[Any, ...], tune: bool) -> list[Any]:
    query, key, value, _, _, late, keys, values, _ = case
    usual = code.planned(query, key, value, keys, values, late)
    if not tune:
        return [usual]
    groups = math.gcd(len(keys), len(values))
    found = []
    for tile, warps, stages, per in itertools.product(*TUNED.values()):
        parts = max(1, min(per * code.processors(query.device)[0] // (len(query) * groups), key.shape[2] // 256))
        found.append(code.Plan(tile, warps, stages, parts))
    return [usual, *dict.fromkeys(found)]


@app.command()
def kernel(
    names: Annotated[str, typer.Option("--shapes", help="names of CONFIGS, by comma")] = ",".join(list(CONFIGS)[:3]),
    cases: Annotated[str, typer.Option(help="batch x context, by comma")] = "64x8192,1x131072",
    masked: Annotated[bool, typer.Option(help="with the mask of a static cache, all filled")] = False,
    forms: Annotated[str, typer.Option(help="all, half, late: what is kept, by comma")] = "all,half,late",
    merge: Annotated[int, typer.Option(help="key heads that share; 0: as many as compress lets")] = 0,
    tune: Annotated[bool, typer.Option(help="try many plans")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
) -> None:
    """The kernel alone: bytes of keys and values that it reads in a second."""
    record = opened(json_file)
    record["copy"] = copy_speed()
    typer.echo(f"a copy reads and writes {record['copy'] / 1e12:.2f} TB/s")
    if slim_attention.decode is None or not CUDA:
        typer.echo("no kernel: it needs Triton and a GPU")
        kept(json_file, record)
        return
    from deadweight.slim import kernels as code

    record["kernel"] = []
    for name, shape, form in itertools.product(names.split(","), cases.split(","), forms.split(",")):
        batch, context = map(int, shape.split("x"))
        case = kernel_case(*kernel_shapes()[name], batch, context, form, masked, merge)
        size = sum(z.numel() * z.element_size() for z in case[1:3])
        for plan in plans(code, case, tune):
            try:
                job = replayed(lambda case=case, plan=plan: code.decoded(*case, plan))
                found = in_turns({"": job}, 3)[""] / 10
            except (RuntimeError, code.triton.runtime.OutOfResources) as error:
                typer.echo(f"{plan}: {str(error).splitlines()[0][:100]}")
                continue
            row = {"model": name, "form": form, "batch": batch, "context": context, "plan": vars(plan)}
            row |= {"microseconds": found * 1e6, "bytes_per_second": size / found}
            record["kernel"].append(row)
            typer.echo(
                f"{name}, {form}, {batch} × {context:,}, {plan}: {found * 1e6:.1f} µs, {size / found / 1e12:.2f} TB/s"
            )
            kept(json_file, record)
        cleaned()


def is_compiled(row: Record) -> bool:
    return bool(row["rival"].endswith(", compiled"))


def together(rows: list[Record], row: Record) -> list[Record]:
    """All rivals in the same circumstances."""
    return [r for r in rows if all(r[k] == row[k] for k in ("model", "batch", "context", "filled"))]


def alike(rows: list[Record], row: Record) -> dict[str, float]:
    """Tokens per second of those that are compiled or not as this one."""
    return {r["rival"]: r["tokens_per_second"] for r in together(rows, row) if is_compiled(r) == is_compiled(row)}


def summary(rows: list[Record]) -> list[str]:
    """For every shape: how many times as fast slim decoding is as the original's, by attention."""
    lines = []
    for row in rows:
        if row["rival"].removesuffix(", compiled") != BEST[1]:
            continue
        speeds = alike(rows, row)
        best = max((n for n in speeds if n.startswith("original")), key=lambda n: speeds[n], default="")
        times = [
            f"{speeds[row['rival']] / speeds[n]:.2f} times {n.partition(', ')[2].removesuffix(', compiled')}"
            f"{' (the fastest)' * (n == best)}"
            for n in speeds
            if n.startswith("original")
        ]
        how = ", both compiled" * is_compiled(row)
        lines.append(
            f"- {row['model']}, {row['batch']} × {row['context']:,}{how}, of the original: {', '.join(times)}."
        )
    return lines


def page(record: Record) -> str:
    setting = record["setting"]
    lines = [
        "# Decoding from a smaller cache",
        "",
        f"`benchmarks/decode.py` on {setting['machine']}, torch {setting['torch']}, bfloat16. A step is one token for "
        "every row of the batch, from a cache that is full, as a CUDA graph; all in turns, medians. Weights are "
        "random, which changes nothing but the text: slim models keep half of the cache in every layer or, *sizes as "
        "compressed*, as much as `compress` gave each layer of the trained model. Sdpa with a mask is what "
        "transformers does with a static cache; all others have no mask, unless it is said, on a cache that is "
        "exactly as long as it is filled.",
        "",
        "The slim model without late keys, our kernel and no mask, in tokens per second:",
        "",
        *summary(record["speed"]),
        "",
        "| model | batch × context | | KV bytes per token | ms per step | tokens/s | against sdpa with a mask | "
        "against the best original | cache, GB | besides, GB |",
        "| --- " * 10 + "|",
    ]
    for row in record["speed"]:
        speeds = alike(record["speed"], row)
        best = max((v for n, v in speeds.items() if n.startswith("original")), default=float("nan"))
        usual = next((r["tokens_per_second"] for r in together(record["speed"], row) if r["rival"] == USUAL), math.nan)
        part = "" if row["filled"] == row["context"] else f", {row['filled']:,} filled"
        lines.append(
            f"| {row['model']} | {row['batch']} × {row['context']:,}{part} | {row['rival']} | "
            f"{row['bytes_per_token']:,.0f} | {row['milliseconds']:.2f} | {row['tokens_per_second']:,.0f} | "
            f"{row['tokens_per_second'] / usual:.2f} | {row['tokens_per_second'] / best:.2f} | "
            f"{row['cache_gigabytes']:.1f} | {row['working_gigabytes']:.2f} |"
        )
    if record["longest"]:
        lines += ["", "## The longest context that fits", "", "| model | batch | | tokens |", "| --- " * 4 + "|"]
        lines += [f"| {r['model']} | {r['batch']} | {r['rival']} | {r['context']:,} |" for r in record["longest"]]
    if record["kernel"]:
        copy = record["copy"]
        lines += ["", "## The kernel alone", "", f"A copy reads and writes {copy / 1e12:.2f} TB/s.", ""]
        lines += [
            "| heads of | kept | batch × context | µs | TB/s of keys and values | of a copy |",
            "| --- " * 6 + "|",
        ]
        shown: dict[Any, Record] = {}
        for r in record["kernel"]:
            shown.setdefault((r["model"], r["form"], r["batch"], r["context"]), r)  # the first plan is the usual one
        lines += [
            f"| {r['model']} | {FORMS[r['form']]} | {r['batch']} × {r['context']:,} | "
            f"{r['microseconds']:.1f} | {r['bytes_per_second'] / 1e12:.2f} | {r['bytes_per_second'] / copy:.0%} |"
            for r in shown.values()
        ]
    return "\n".join([*lines, "", *WORDS.splitlines()]) + "\n"


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="what `run` and `kernel` have written")],
    markdown: Annotated[Path | None, typer.Option(help="write the page here")] = None,
) -> None:
    """The page of a record."""
    told = page(json.loads(file.read_text(encoding="utf-8")))
    Console().print(told, markup=False)
    if markdown is not None:
        markdown.write_text(told, encoding="utf-8")


if __name__ == "__main__":
    app()
