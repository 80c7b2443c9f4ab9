"""Whose cache can be coded? Every causal type that transformers registers, tried on a small model of it.

python benchmarks/cache_types.py --json benchmarks/results/cache_types.json
python benchmarks/cache_types.py --types llama,gpt2 --json FILE --again
python benchmarks/cache_types.py --read benchmarks/results/cache_types.json --markdown docs/cache-types.md

The default config of each type is made small, with random parameters, in float64 if its code can. Its cache is coded on
random tokens. With rounding switched off the model must compute the original's logits; with rounding it must decode,
token by token, to the logits of one forward pass. Every type runs in a process of its own, with a limit of processor
time. Types already in the JSON file are kept: a stopped run goes on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from own_process import Facts, in_own_process
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.run import compress
from deadweight.errors import DeadweightError
from deadweight.report import record
from deadweight.slim.coder import Coder
from deadweight.source.hugging_face import build
from deadweight.source.narrow_clone import narrow_config
from deadweight.source.narrow_sizes import Size
from deadweight.source.printable import reason
from deadweight.source.randomise import randomise

WORDS, ROWS, LENGTH, DECODED = 99, 16, 24, 12
SIZES = [Size(32, length=64, heads=4, vocabulary=WORDS, spare=n, repeat=r) for n, r in ((0, 1), (4, 1), (4, 2))]
SHARE = 0.5
READERS = {
    "codes": "attention, as codes",
    "states": "the model, decoded states",
    "own attention": "its own attention, decoded states",
}
EXACT, IN_FLOAT32 = 1e-8, 2e-5  # of the largest logit: in float64, and where a part of a model computes in float32


@dataclass(frozen=True)
class Row:
    """One model type: whether its cache is coded, and how far apart the logits are, relative to the largest."""

    type: str
    precision: str = ""
    reader: str = ""  # of the cache: "codes" if attention reads them, "states" if the model reads decoded states
    exact: float = 0.0  # without rounding, from the original's
    rounded: float = 0.0  # with rounding, from the original's
    decoded: float = 0.0  # token by token, from those of one forward pass
    drift: float = 0.0  # the same of the original model
    error: str = ""
    ours: bool = True  # the error is a refusal, in one line; else it is a failure
    seconds: float = 0.0  # of processor time

    @property
    def right(self) -> bool:
        return not self.error and self.exact < IN_FLOAT32 and self.decoded < max(IN_FLOAT32, 2 * self.drift)


def examined(model_type: str) -> Facts:
    """Code the cache of a small model of this type, and compare logits."""
    transformers.logging.set_verbosity_error()
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    model = small_model(model_type, ids[:2])
    coded, reader = coded_cache(model, ids, SHARE)
    whole, _ = coded_cache(model, ids, 1.0)  # no coordinate is left out
    for part in whole.modules():
        if isinstance(part, Coder):
            part.rounds = False
    ids = ids[:2, :DECODED]
    with torch.no_grad():
        wanted, found = logits(model, ids), logits(coded, ids)
        size = float(wanted.abs().max())
        return {
            "reader": reader,
            "precision": str(wanted.dtype).removeprefix("torch."),
            "exact": apart(logits(whole, ids), wanted, size),
            "rounded": apart(found, wanted, size),
            "decoded": apart(step_by_step(coded, ids), found, size),
            "drift": apart(step_by_step(model, ids), wanted, size),
        }


def coded_cache(model: Any, ids: Tensor, share: float) -> tuple[Any, str]:
    """The model with a cache of this share, and who reads it."""
    result = compress(model, inputs={"input_ids": ids}, keep_kv=share)
    assert isinstance(result, CacheCompression)
    return result.module, next(iter(result.caches.values())).reader


def small_model(model_type: str, ids: Tensor) -> Any:
    """A small model of the type's default config, with random parameters, that reads these tokens."""
    config = transformers.CONFIG_MAPPING[model_type]()
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    name = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    refusals = []
    for size in SIZES:
        for precision in (torch.float64, torch.float32):
            try:
                model: Any = build(narrow_config(config, size), cls=kind, device="cpu")[0]
                model = randomise(model, 0).to(precision).eval()
                with torch.no_grad():
                    found = logits(model, ids)
            except Exception as error:  # noqa: BLE001 - a stranger's code: the next size
                refusals.append(reason(error))
                continue
            if bool(found.isfinite().all()):
                return model
            refusals.append("its logits are not finite")
    raise DeadweightError(f"no small model of it reads tokens alone: {refusals[0]}; the last attempt: {refusals[-1]}")


def named(model: Any, ids: Any, tokens: Any) -> dict[str, Any]:
    crosses = getattr(model.config, "is_encoder_decoder", False)
    return {"input_ids": ids, "decoder_input_ids": tokens} if crosses else {"input_ids": tokens}


def logits(model: Any, ids: Any) -> Any:
    return model(**named(model, ids, ids), use_cache=False).logits


def step_by_step(model: Any, ids: Any) -> Any:
    """The logits of decoding one token after the other."""
    past, steps = None, []
    for token in ids.split(1, 1):
        output = model(
            **named(model, ids, token), use_cache=True, **({} if past is None else {"past_key_values": past})
        )
        past = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, 1)


def apart(a: Any, b: Any, size: float) -> float:
    return float((a - b).abs().max()) / size


def page_of(rows: list[Row], setting: dict[str, Any]) -> str:
    """The page: what is coded, and what is refused, with the reasons."""
    right = [r for r in rows if r.right]
    wrong = [r for r in rows if not r.error and not r.right]
    lines = [
        "# Cache types: whose cache can be coded?",
        "",
        "This page says for which causal types of transformers `deadweight compress` codes the cache, and why not for "
        "the others.",
        "",
        f"**The caches of {len(right)} of {len(rows)} types are coded; {len(wrong) or 'none'} of them wrongly.**",
        "",
        f"Each type was tried on a small model of its default config: random parameters, width 32, in "
        "float64 if its code can. *Exact*: the logits with codes of all coordinates that are not rounded, from the "
        "original's. *Decoded*: the logits token by token, with half of the bytes, from those of one forward pass with "
        "the same codes. Both relative to the largest logit: where a part of a model computes in float32, they are as "
        f"near as that allows. torch {setting['torch']}, transformers {setting['transformers']}. Written by "
        "`benchmarks/cache_types.py`.",
        "",
        "| type | who reads the cache | precision | exact | decoded |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {r.type} | {READERS[r.reader]} | {r.precision} | {r.exact:.0e} | {r.decoded:.0e} |" for r in right),
    ]
    if wrong:
        lines += ["", "## Wrong", "", "| type | exact | decoded | the original, decoded |", "| --- | --- | --- | --- |"]
        lines += [f"| {r.type} | {r.exact:.0e} | {r.decoded:.0e} | {r.drift:.0e} |" for r in wrong]
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r.error:
            reasons.setdefault(r.error.replace("|", "/"), []).append(r.type)
    lines += ["", "## Not coded", "", "| types | why |", "| --- | --- |"]
    lines += [f"| {', '.join(types)} | {why} |" for why, types in sorted(reasons.items(), key=lambda x: -len(x[1]))]
    return "\n".join(lines) + "\n"


def main(
    types: Annotated[str, typer.Option(help="Only these types, separated by commas.")] = "",
    seconds: Annotated[int, typer.Option(help="Limit of processor time per type, in seconds.")] = 60,
    again: Annotated[bool, typer.Option(help="Try these types again, even if the record has them.")] = False,
    json_file: record.JsonOption = None,
    recorded: record.ReadOption = None,
    page: record.PageOption = None,
) -> None:
    setting = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "seconds": seconds}
    file, rows = recorded or json_file, dict[str, Row]()
    if file is not None and file.exists():
        setting, known = record.read_rows(file)
        rows = {r["type"]: Row(**r) for r in known}
    wanted = types.split(",") if types else list(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for model_type in wanted if recorded is None else ():
        if model_type in rows and not again:
            continue
        rows[model_type] = row = Row(**(in_own_process(examined, model_type, seconds) | {"type": model_type}))
        print(f"{model_type}: {'right' if row.right else row.error or row} {row.seconds} s", flush=True)
        record.write_rows(json_file, setting, [rows[t] for t in sorted(rows)])
    if page is not None:
        page.write_text(page_of([rows[t] for t in sorted(rows)], setting), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    typer.run(main)
