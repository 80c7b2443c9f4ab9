"""A whole query, key or value matrix can become the identity: where that is exact, where it is not, and by how much.

Published (arXiv 2510.23912): without norms, a transformer with both skips and one layer, or with a skip around
attention only, or with both skips and all layers sharing their weights, has an equal one without query weights; the
same for keys or values. Here the change of basis is written out (`transformed`), for our own transformer in float64:

    Θ_l = W_Q^l (or W_K^l, W_V^l), and the stream that layer l reads becomes Θ_l x:
    tables E ← E Θ_0ᵀ;  W_Q, W_K, W_V, W_up ← (·) Θ_l⁻¹;  W_O ← Θ_l W_O;  W_down ← Θ_{l+1} W_down;  readout ← (·) Θ_L⁻¹

A skip carries x past a map without touching it, so it needs the same Θ on both of its sides. The attention's skip lies
inside one Θ_l; the MLP's lies between Θ_l and Θ_{l+1}. That is what the three cases are about, and where the
counter-cases fail. Dimensions decide that no other recipe could help: the rank of the Jacobian of all outputs with
respect to all weights, for the full shape and for the one with an identity.

    python studies/s2_exact.py run --out studies/s2_exact.json
    python studies/s2_exact.py report studies/s2_exact.json --markdown docs/exact-projections.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import deadweight
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, save_record
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

app = typer.Typer(add_completion=False, help=__doc__)
Weights = dict[str, Tensor]
PROJECTIONS, POSITIONS = ("query", "key", "value"), ("learned", "rotary")
EXACT = 1e-12  # of a relative error in float64


@dataclass(frozen=True)
class Case:
    """A shape, given by its changes to a base: three layers, both skips, no norm, an untied readout."""

    name: str
    shape: dict[str, Any]
    holds: bool  # whether the claim is that Q, K and V can each go
    projections: tuple[str, ...] = PROJECTIONS
    why: str = ""


CASES = (
    Case("one layer, both skips", {"n_layers": 1}, True, why="one Θ for everything"),
    Case("attention skip only", {"mlp_skip": False}, True, why="Θ may change at every MLP"),
    Case("both skips, shared weights", {"shared_layers": True}, True, why="one Θ for everything"),
    Case("grouped keys, Q", {"mlp_skip": False, "key_heads": 2}, True, ("query",), "W_Q is square all the same"),
    Case("both skips, unshared weights", {}, False, why="the MLP's skip carries Θ_l x where Θ_{l+1} x is read"),
    Case("one layer, LayerNorm", {"n_layers": 1, "norm": "layer"}, False, why="LN(Θx) ≠ Θ LN(x)"),
    Case("one layer, RMSNorm", {"n_layers": 1, "norm": "rms"}, False, why="RMS(Θx) ≠ Θ RMS(x)"),
    Case("attention skip only, RMSNorm", {"mlp_skip": False, "norm": "rms"}, False, why="RMS(Θx) ≠ Θ RMS(x)"),
    Case(
        "one layer, tied readout",
        {"n_layers": 1, "tie_word_embeddings": True},
        False,
        why="the table would have to be E Θᵀ for the input and E Θ⁻¹ for the output",
    ),
    Case(
        "grouped keys, K or V",
        {"mlp_skip": False, "key_heads": 2},
        False,
        ("key", "value"),
        "half of the rows: Θ has no inverse",
    ),
)


@dataclass(frozen=True)
class Settings:
    d_model: int = 32
    heads: int = 4
    layers: int = 3
    hidden: int = 80
    vocabulary: int = 50
    context: int = 24
    sequences: int = 16
    seeds: int = 5
    rank_width: int = 6  # of the models whose Jacobians are ranked


def model_of(case: Case, positions: str, seed: int, s: Settings, **more: Any) -> TransformerForCausalLM:
    """Random weights of variance 1/d, which give scores of order one: attention is far from uniform."""
    options = {"d_model": s.d_model, "heads": s.heads, "n_layers": s.layers, "hidden": s.hidden, "norm": "none"}
    options |= {"vocab_size": s.vocabulary, "context": s.context, "tie_word_embeddings": False, "use_cache": False}
    options |= {"positions": positions, **case.shape, **more}
    torch.manual_seed(seed)
    model = TransformerForCausalLM(TransformerConfig(**options, init_std=options["d_model"] ** -0.5)).double().eval()
    for name, weight in model.named_parameters():  # gains and shifts too: ones and zeros would hide what they do
        if "norm" in name:
            weight.data = 1 + 0.3 * torch.randn_like(weight)
    return model


def square(weight: Tensor, width: int) -> Tensor:
    """The projection as a change of basis of the residual stream; a grouped one is repeated for its query heads."""
    return weight if weight.shape[0] == width else weight.repeat(width // weight.shape[0], 1)


def transformed(model: TransformerForCausalLM, projection: str) -> Weights:
    """The weights of the equivalent model with an identity projection, by the rule at the top of this file."""
    old, config = dict(model.named_parameters()), model.config
    stored = 1 if config.shared_layers else config.n_layers
    turns = [
        square(old[f"transformer.layers.{i}.attention.{projection}.weight"].detach(), config.d_model)
        for i in range(stored)
    ]
    back = [torch.linalg.pinv(t) for t in turns]
    end = turns[-1] if config.mlp_skip else torch.eye(config.d_model, dtype=torch.float64)  # Θ_L: free without the skip
    new = {n: w.detach().clone() for n, w in old.items()}
    for table in ("tokens", "places"):
        if (name := f"transformer.{table}.weight") in new:
            new[name] = old[name].detach() @ turns[0].T
    for i in range(stored):
        layer, after = f"transformer.layers.{i}.", turns[i + 1] if i + 1 < stored else end
        for reader in ("attention.query", "attention.key", "attention.value", "mlp.up"):
            new[f"{layer}{reader}.weight"] = new[f"{layer}{reader}.weight"] @ back[i]
        new[f"{layer}attention.output.weight"] = turns[i] @ new[f"{layer}attention.output.weight"]
        new[f"{layer}mlp.down.weight"] = after @ new[f"{layer}mlp.down.weight"]
        del new[f"{layer}attention.{projection}.weight"]
    if "readout.weight" in new:
        new["readout.weight"] = old["readout.weight"].detach() @ torch.linalg.pinv(end)
    return new


def identity_model(model: TransformerForCausalLM, projection: str) -> TransformerForCausalLM:
    """A model without the weights of the projection."""
    kept = {k: v for k, v in model.config.to_dict().items() if k in TransformerConfig.__dataclass_fields__}
    if projection != "query":
        kept["key_heads"] = None  # an identity has as many heads as the stream is wide
    small = TransformerForCausalLM(TransformerConfig(**{**kept, projection: "identity"})).double().eval()
    new = transformed(model, projection)
    other = {"key": "value", "value": "key"}.get(projection)
    for name in [n for n in new if other and n.endswith(f"attention.{other}.weight")]:
        new[name] = square(new[name], model.config.d_model)
    missing, unknown = small.load_state_dict(new, strict=False)
    assert not unknown and set(missing) <= {"readout.weight"}, (missing, unknown)
    return small


@torch.no_grad()
def error(model: TransformerForCausalLM, small: TransformerForCausalLM, tokens: Tensor) -> float:
    """The largest difference of two logits, relative to the largest logit."""
    y = model(tokens).logits
    return float((small(tokens).logits - y).abs().max() / y.abs().max())


@torch.no_grad()
def attention_spread(model: TransformerForCausalLM, tokens: Tensor) -> float:
    """Distance of the logits to those of a model with uniform attention; at 0 the test would be empty."""
    flat = TransformerForCausalLM(model.config).double().eval()
    flat.load_state_dict(model.state_dict())
    for name, weight in flat.named_parameters():
        if name.endswith("query.weight"):
            weight.zero_()
    return error(model, flat, tokens)


def measured(case: Case, s: Settings) -> Iterator[dict[str, Any]]:
    for positions in POSITIONS:
        for projection in case.projections:
            for seed in range(s.seeds):
                model = model_of(case, positions, seed, s)
                tokens = torch.randint(0, s.vocabulary, (s.sequences, s.context))
                small = identity_model(model, projection)
                turns = [w for n, w in model.named_parameters() if n.endswith(f"{projection}.weight")]
                yield {
                    "case": case.name,
                    "positions": positions,
                    "projection": projection,
                    "seed": seed,
                    "error": error(model, small, tokens),
                    "condition": max(float(torch.linalg.cond(t.detach())) for t in turns),
                    "parameters": [model.num_parameters(), small.num_parameters()],
                    "uniform_attention": attention_spread(model, tokens),
                }


def dimension(model: TransformerForCausalLM, seed: int) -> tuple[int, int, float]:
    """The local dimension of the function space (rank of the Jacobian), the number of parameters, and the gap: the
    smallest singular value that counts, relative to the largest that does not."""
    weights = {n: p.detach() for n, p in model.named_parameters()}
    size, config = sum(w.numel() for w in weights.values()), model.config
    rows = 1 + 2 * size // (config.context * config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows, config.context), generator=generator)

    def outputs(mine: Weights) -> Tensor:
        return functional_call(model, mine, (tokens,)).logits.flatten()

    with sdpa_kernel(SDPBackend.MATH):  # the one that is differentiated in batches
        parts = jacrev(outputs, chunk_size=256)(weights)
    jacobian = torch.cat([p.flatten(1) for p in parts.values()], 1)
    values = torch.linalg.svdvals(jacobian / jacobian.norm(dim=0).clamp_min(1e-300))
    rank = int((values > 1e-9 * values[0]).sum())
    below = float(values[rank]) if rank < len(values) else 0.0
    return rank, size, float(values[rank - 1]) / max(below, 1e-300)


def ranked(case: Case, s: Settings) -> Iterator[dict[str, Any]]:
    """The dimension of both families at a random point. If one has fewer, it cannot express almost all full models."""
    d = s.rank_width
    tiny = {"d_model": d, "heads": 2, "hidden": d + 2, "vocab_size": d + 3, "context": 4}
    tiny |= {"n_layers": min(2, case.shape.get("n_layers", 2))}
    tiny |= {"key_heads": 1} if "key_heads" in case.shape else {}
    full, size, gap = dimension(model_of(case, "learned", 0, s, **tiny), 0)
    for projection in case.projections:
        if projection != "query" and "key_heads" in case.shape:
            continue  # that shape does not exist
        small, fewer, other = dimension(model_of(case, "learned", 1, s, **{**tiny, projection: "identity"}), 1)
        yield {
            "case": case.name,
            "projection": projection,
            "parameters": [size, fewer],
            "dimensions": [full, small],
            "gap": min(gap, other),
        }


def refused(case: Case, s: Settings) -> str | None:
    """The error message of a shape whose identity projection cannot be built."""
    if "key_heads" not in case.shape or case.projections == ("query",):
        return None
    try:
        model_of(case, "learned", 0, s, key="identity")
    except ValueError as error_:
        return str(error_)
    return None


def sliced_keys(s: Settings) -> list[dict[str, Any]]:
    """Grouped keys: Θ = [W_K; rest] makes W_K = [I 0]: no identity, but keys are some of the stream's channels."""
    errors = []
    case = Case("", {"n_layers": 1, "key_heads": 2}, True)
    for positions in POSITIONS:
        for seed in range(s.seeds):
            model = model_of(case, positions, seed, s)
            own = dict(model.named_parameters())
            rows = torch.cat([own[f"transformer.layers.0.attention.{n}.weight"].detach() for n in ("key", "value")])
            theta = torch.cat([rows, torch.linalg.svd(rows).Vh[len(rows) :]])  # both, where they fit into the width
            back, small = torch.linalg.inv(theta), model_of(case, positions, seed, s)
            new = {n: w.detach().clone() for n, w in own.items()}
            for name in new:
                if name.endswith(("query.weight", "key.weight", "value.weight", "up.weight", "readout.weight")):
                    new[name] = new[name] @ back
                elif name.endswith(("output.weight", "down.weight")):
                    new[name] = theta @ new[name]
                else:
                    new[name] = new[name] @ theta.T
            chosen = torch.eye(s.d_model, dtype=torch.float64)[: len(rows)].split(len(rows) // 2)
            rounding = 0.0
            for name, part in zip(("key", "value"), chosen, strict=True):
                full = f"transformer.layers.0.attention.{name}.weight"
                rounding = max(rounding, float((new[full] - part).abs().max()))
                new[full] = part
            small.load_state_dict(new)
            tokens = torch.randint(0, s.vocabulary, (s.sequences, s.context))
            errors.append({"positions": positions, "seed": seed, "error": error(model, small, tokens)})
            assert rounding < EXACT, rounding
    return errors


def library(case: Case, s: Settings) -> dict[str, Any]:
    """The result of `deadweight.reduce` on a random model."""
    model = model_of(case, "learned", 0, s)
    told = deadweight.reduce(model, select=["DW015"])
    worst = told.verification.worst if told.verification else None
    return {
        "case": case.name,
        "identities": [step.parameter for step in told.steps],
        "layers": 1 if model.config.shared_layers else model.config.n_layers,
        "parameters": [told.parameters_before, told.parameters_after],
        "error": worst.float64 if worst else None,
    }


@app.command()
def run(
    out: OutOption,
    seeds: Annotated[int, typer.Option(help="Random models of every kind.")] = 5,
    width: Annotated[int, typer.Option(help="Width of the residual stream; there are four heads.")] = 32,
    rank_width: Annotated[int, typer.Option(help="Width of the models whose Jacobians are computed.")] = 6,
    with_library: Annotated[
        bool, typer.Option("--library/--no-library", help="Also reduce the models by deadweight.reduce.")
    ] = True,
) -> None:
    """Measure, and write the record."""
    transformers.logging.set_verbosity_error()
    s = Settings(d_model=width, hidden=5 * width // 2, seeds=seeds, rank_width=rank_width)
    record: dict[str, Any] = {"setting": setting(s), "measured": [], "ranks": [], "refused": {}, "library": []}
    for case in CASES:
        print(case.name, flush=True)
        record["measured"] += list(measured(case, s))
        record["ranks"] += list(ranked(case, s))
        record["refused"] |= {case.name: words} if (words := refused(case, s)) else {}
        record["library"] += [library(case, s)] if with_library and "value" not in case.projections[1:2] else []
    record["slices"] = sliced_keys(s)
    save_record(out, record)


def setting(s: Settings) -> dict[str, Any]:
    return {
        **asdict(s),
        "precision": "float64",
        **circumstances(),
    }


def errors(record: dict[str, Any], case: str, positions: str | None = None, projection: str | None = None) -> list:
    return [
        m["error"]
        for m in record["measured"]
        if m["case"] == case and positions in (None, m["positions"]) and projection in (None, m["projection"])
    ]


def span(values: list[float]) -> str:
    """The largest value and, if it differs much, the smallest."""
    if not values:
        return ""
    return f"{max(values):.1e}" if max(values) < 1e-9 else f"{min(values):.2g} … {max(values):.2g}"


def verdict(record: dict[str, Any], case: Case) -> str:
    """Whether the condition number of Θ explains an error beyond the bound: rounding grows with it."""
    mine = [m for m in record["measured"] if m["case"] == case.name]
    if not case.holds:
        return "holds: it fails, as claimed" if min(m["error"] for m in mine) > 1e-3 else "not seen here"
    beyond = [m for m in mine if m["error"] > EXACT]
    if not beyond:
        return "holds"
    if all(m["error"] <= EXACT * m["condition"] / 1e3 for m in beyond):
        worst = max(beyond, key=lambda m: m["error"])
        told = f"{worst['error']:.1e} at condition number {worst['condition']:.0f}, {span_of_others(mine)} elsewhere"
        return f"holds with conditions: Θ must be well conditioned ({told})"
    return "not seen here"


def span_of_others(mine: list[dict[str, Any]]) -> str:
    return f"{max(m['error'] for m in mine if m['error'] <= EXACT):.1e} or less"


def written(record: dict[str, Any]) -> str:
    s = record["setting"]
    lines = [
        "# Whole projections as the identity: exact, or not at all",
        "",
        "This page tests in which transformers a whole query, key or value projection can be the identity without "
        "changing the function (arXiv 2510.23912).",
        "",
        *verdict_table(record),
        "",
        "## Setting",
        "",
        "Written by `studies/s2_exact.py` from its record. Random models in float64: "
        f"width {s['d_model']}, {s['heads']} heads, {s['layers']} layers unless the row says otherwise, {s['hidden']} "
        f"hidden units, GELU, no biases, {s['seeds']} seeds; {s['sequences']} sequences of {s['context']} tokens; "
        f"torch {s['torch']}, {s['machine']}. An error is the largest difference of two logits over the largest logit, "
        "between the model and one that *does not have* the projection.",
        "",
        *rule(),
        "",
        "## Exact cases: largest error over all seeds",
        "",
        *exact_table(record),
        "",
        "## Counter-cases: smallest and largest error of the same transformation",
        "",
        *failing_table(record),
        "",
        "## No other construction can help: dimensions",
        "",
        *rank_table(record),
        "",
        "## What `deadweight reduce` does",
        "",
        *library_table(record),
        "",
        "![errors](exact-projections.svg)",
    ]
    return "\n".join(lines) + "\n"


def verdict_table(record: dict[str, Any]) -> list[str]:
    return [
        "## Verdicts",
        "",
        "| claim (arXiv 2510.23912) | verdict |",
        "| --- | --- |",
        *(f"| {c.name}: {', '.join(c.projections)} can be the identity | {verdict(record, c)} |" for c in CASES[:4]),
        *(f"| {c.name}: no exact form | {verdict(record, c)} |" for c in CASES[4:]),
    ]


def rule() -> list[str]:
    return [
        "The rule. Let Θ_l be the projection of layer l that is to become the identity (for example W_Q, square and",
        "invertible). Write the stream that layer l reads in the basis Θ_l x. The function stays the same with",
        "",
        "    tables E ← E Θ_0ᵀ      W_Q, W_K, W_V, W_up ← (·) Θ_l⁻¹      W_O ← Θ_l W_O",
        "    W_down ← Θ_{l+1} W_down      readout ← (·) Θ_L⁻¹",
        "",
        "and the new query projection W_Q Θ_l⁻¹ is the identity. Rotary positions act after the projection, so Θ "
        "does not",
        "affect them. A skip needs the same Θ at its start and at its end. The skip around attention has it; the skip",
        "around the MLP has it only if Θ_l = Θ_{l+1}. So there must be no skip around the MLP, or one layer, or the "
        "same",
        "W_Q in all layers. A norm would have to commute with Θ.",
    ]


def exact_table(record: dict[str, Any]) -> list[str]:
    heads = [f"{p}, {n}" for p in POSITIONS for n in ("Q", "K", "V")]
    lines = [f"| case | {' | '.join(heads)} | parameters | without attention |", "| --- " * 9 + "|"]
    for case in (c for c in CASES if c.holds):
        cells = [span(errors(record, case.name, p, n)) or "—" for p in POSITIONS for n in PROJECTIONS]
        mine = [m for m in record["measured"] if m["case"] == case.name]
        before, after = mine[0]["parameters"]
        flat = min(m["uniform_attention"] for m in mine)
        lines.append(f"| {case.name} | {' | '.join(cells)} | {before:,} → {after:,} | {flat:.2g} |")
    condition = max(m["condition"] for m in record["measured"])
    sliced = span([m["error"] for m in record["slices"]])
    return [
        *lines,
        "",
        "*Without attention*: the smallest error if attention weights are made uniform, which shows that the scores "
        f"matter. Condition numbers of Θ reach {condition:.0f}.",
        "",
        "Grouped key and value projections are not square, so they cannot be the identity. They need no weights "
        "either: with Θ = [W_K; W_V; the rest] and half as many key heads as query heads, W_K becomes [I 0] and W_V "
        "becomes [0 I]. The keys are then the first half of the stream's channels and the values are the second. "
        f"Largest error in one layer with both skips: {sliced}.",
    ]


def failing_table(record: dict[str, Any]) -> list[str]:
    lines = ["| case | Q | K | V | why |", "| --- " * 5 + "|"]
    for case in (c for c in CASES if not c.holds):
        cells = [span(errors(record, case.name, None, n)) or "—" for n in PROJECTIONS]
        lines.append(f"| {case.name} | {' | '.join(cells)} | {case.why} |")
    for case_name, said in record["refused"].items():
        lines += ["", f"{case_name}: the model cannot be built (“{said}”); the numbers are for the pseudo-inverse."]
    return lines


def rank_table(record: dict[str, Any]) -> list[str]:
    width = record["setting"]["rank_width"]
    lines = [
        f"Width {width}, two layers unless the row says otherwise. The rank of the Jacobian of all outputs with "
        "respect to all weights is the dimension of the set of functions that a shape can represent. If it is the "
        "same with and without the projection, nothing is lost. If it is smaller, functions with the identity are a "
        "set of measure zero among the others: almost no full model has an equal without the projection, whatever "
        "the construction.",
        "",
        "| case | identity | parameters | dimensions | lost | gap |",
        "| --- " * 6 + "|",
    ]
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in record["ranks"]:
        alike.setdefault((r["case"], *r["parameters"], *r["dimensions"]), []).append(r)
    for (name, size, fewer, full, small), rows in alike.items():
        gap = 10 ** math.floor(math.log10(min(r["gap"] for r in rows)))
        which = ", ".join(r["projection"] for r in rows)
        row = f"{size:,} → {fewer:,} | {full:,} → {small:,} | {full - small} | {gap:.0e}"
        lines.append(f"| {name} | {which} | {row} |")
    return lines


def library_table(record: dict[str, Any]) -> list[str]:
    lines = [
        '`deadweight.reduce(model, select=["DW015"])`; the first square projection that reads the stream is taken, Q.',
        "",
        "| case | layers | projections that became the identity | parameters | error in float64 |",
        "| --- " * 5 + "|",
    ]
    for r in record["library"]:
        before, after = r["parameters"]
        short = ", ".join(p.removeprefix("transformer.layers.").removesuffix(".weight") for p in r["identities"])
        off = f"{r['error']:.1e}" if short else "—"
        lines.append(f"| {r['case']} | {r['layers']} | {short or 'none'} | {before:,} → {after:,} | {off} |")
    return lines


def figure(record: dict[str, Any], file: Path) -> None:
    """Every error of every case, on a logarithmic axis."""
    picture, axes = pyplot().subplots(figsize=(7.5, 4.2), layout="constrained")
    for place, case in enumerate(CASES):
        for shift, (name, mark) in enumerate(zip(PROJECTIONS, "osD", strict=True)):
            values = errors(record, case.name, None, name)
            label = name if place == 0 else None
            axes.scatter(
                values, [-place + 0.2 * (1 - shift)] * len(values), s=12, marker=mark, c=f"C{shift}", label=label
            )
    axes.set_xscale("log")
    axes.axvline(EXACT, color="grey", linewidth=0.8)
    axes.set_yticks([-i for i in range(len(CASES))], [c.name for c in CASES], fontsize=8)
    axes.set_xlabel("relative error of the logits, float64")
    axes.legend(fontsize=8, loc="upper center")
    axes.set_title("A projection made the identity: every seed, learned and rotary positions", fontsize=9)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
