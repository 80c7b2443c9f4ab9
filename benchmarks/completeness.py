"""Do the laws miss redundant dimensions? Explained against measured, for many architectures, by the public audit.

python benchmarks/completeness.py --json benchmarks/results/completeness.json --markdown docs/completeness.md
python benchmarks/completeness.py --read benchmarks/results/completeness.json --markdown docs/completeness.md

Measured: the nullity of the Jacobian of all outputs with respect to all parameters, in float64 with random parameters.
Explained: the rank of the motions of every claim. Models already in the JSON file are kept: a stopped run goes on.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from torch import nn

import deadweight
from deadweight.errors import DeadweightError
from deadweight.report import record

GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 5, "n_inner": 12}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
BERT = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11, "intermediate_size": 12}
BERT |= {"max_position_embeddings": 5, "type_vocab_size": 1, "layer_norm_eps": 1e-12, "pad_token_id": 0}
LLAMA = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11, "intermediate_size": 12}
LLAMA |= {"rms_norm_eps": 0.0, "max_position_embeddings": 5, "bos_token_id": 0, "eos_token_id": 0}
REFERENCES: dict[str, tuple[int, Callable[[], nn.Module]]] = {  # the count that is known, and the model
    "GPT-2, tied": (345, lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))),
    "GPT-2, untied": (
        400,
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=False)),
    ),
    "BERT, no pooler": (344, lambda: transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False)),
    "LLaMA": (173, lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))),
    "LLaMA, one KV head": (
        133,
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_key_value_heads=1)),
    ),
}
CLONES = [
    "OPTForCausalLM",
    "RobertaForMaskedLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTJForCausalLM",
    "BloomForCausalLM",
    "PhiForCausalLM",
    "FalconForCausalLM",
    "T5ForConditionalGeneration",
    "ViTModel",
    "CLIPModel",
    "WhisperForConditionalGeneration",
]
LAYERS = {
    f"nn.TransformerEncoder, {'pre' if first else 'post'}-norm, {act}": (first, act)
    for first in (True, False)
    for act in ("gelu", "relu")
}


@dataclass(frozen=True)
class Row:
    """One model."""

    name: str
    parameters: int
    measured: int
    explained: int
    unsound: int
    known: int | None  # the count that it must have
    by_law: list[list[Any]]
    clone: str
    shortfall: list[str]
    seconds: float
    error: str = ""


def models() -> dict[str, Callable[[], deadweight.Audit]]:
    return {
        **{name: (lambda make=make: audit_live(make)) for name, (_, make) in REFERENCES.items()},
        **{name: (lambda name=name: audit_config(name)) for name in CLONES},
        **{name: (lambda pair=pair: audit_encoder(*pair)) for name, pair in LAYERS.items()},
    }


def audit_live(make: Callable[[], nn.Module]) -> deadweight.Audit:
    return deadweight.audit(make(), complete=True)


def audit_config(architecture: str) -> deadweight.Audit:
    """The default config of the architecture, from its file as a user would; it is counted on a narrow clone."""
    config = getattr(transformers, architecture).config_class()
    config.architectures = [architecture]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return deadweight.audit(str(Path(folder) / "config.json"), complete=True)


def audit_encoder(norm_first: bool, activation: str) -> deadweight.Audit:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return deadweight.audit(encoder, torch.randn(1, 5, 8), complete=True)


def measure(name: str, audit: Callable[[], deadweight.Audit]) -> Row:
    known = REFERENCES[name][0] if name in REFERENCES else None
    start = time.perf_counter()
    try:
        result = audit()
    except DeadweightError as error:
        return Row(name, 0, 0, 0, 0, known, [], "", [], round(time.perf_counter() - start, 1), str(error))
    count, seconds = result.completeness, round(time.perf_counter() - start, 1)
    if count is None:
        return Row(name, 0, 0, 0, 0, known, [], "", [], seconds, result.untraced or "no account was made")
    short = [f"{u.parameter}: {u.why}" for u in result.unknown if u.why.startswith("unexplained")]
    laws = [list(pair) for pair in count.by_law]
    return Row(
        name, count.parameters, count.measured, count.explained, count.unsound, known, laws, count.clone, short, seconds
    )


def markdown(rows: list[Row], setting: dict[str, Any]) -> str:
    whole = sum(r.measured == r.explained and not r.unsound and not r.error for r in rows)
    lines = [
        "# Completeness: do the laws explain every redundant dimension?",
        "",
        "This page says for which well-known models the laws explain every redundant dimension.",
        "",
        f"**{whole} of {len(rows)} models are complete.** A claim is unsound in "
        f"{sum(bool(r.unsound) for r in rows) or 'none'} of them.",
        "",
        f"`deadweight.audit(…, complete=True)` in float64 with random parameters; torch {setting['torch']}, "
        f"transformers {setting['transformers']}. *Measured* is the nullity of the Jacobian of the outputs; "
        "*explained* is the rank of the directions that the laws claim; *known* is the count that the model must "
        "have; *unsound* is the number of claimed directions that change an output. Written by "
        "`benchmarks/completeness.py`.",
        "",
        "| model | parameters | measured | explained | known | unsound | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        measured = r.error or f"{r.measured}"
        explained = f"{r.explained}" if r.measured == r.explained else f"**{r.explained}**"
        cells = (r.name, r.parameters, measured, explained, r.known or "", r.unsound, f"{r.seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## By law", "", "The number after a law is the rank that it adds to the laws before it.", ""]
    lines += [f"- {r.name}: {', '.join(f'{code} {n}' for code, n in r.by_law if n)}." for r in rows if r.by_law]
    short = [r for r in rows if r.shortfall]
    lines += ["", "## What is not explained", ""] + ["Nothing."] * (not short)
    lines += [f"- {r.name}: {'; '.join(r.shortfall)}." for r in short]
    return "\n".join([*lines, *setting.get("notes", ())]) + "\n"


def main(
    only: Annotated[str, typer.Option(help="Only models whose name contains this.")] = "",
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    file = recorded or json_file
    setting, recorded_rows = record.read_rows(file) if file is not None else ({}, [])
    if recorded is None:
        setting |= {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    rows = [Row(**r) for r in recorded_rows]
    console = Console()
    for name, audit in models().items() if recorded is None else ():
        if only in name and name not in {r.name for r in rows}:
            rows.append(measure(name, audit))
            r = rows[-1]
            console.print(f"{name}: {r.explained} / {r.measured} {r.error} {r.seconds} s", highlight=False)
            record.write_rows(json_file, setting, rows)
    if page is not None:
        page.write_text(markdown(rows, setting), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
