"""Do the rules about biases hold for encoders that are trained from scratch? With masked tokens, and on images.

By proof (laws DW002, DW003, DW007): in a post-norm encoder with learned positions the key bias is dead, the value bias
folds into the output bias, and the second bias of the MLP and the query bias fold into the shift of the norm before.
What folds can be left out without losing any function. Here small encoders learn with all biases and without some of
them: a BERT that predicts masked bytes of Python's manual, and a ViT that reads handwritten digits in patches of 2 × 2.
All variants of a seed begin with the same weights and see the same batches.

    python studies/s1_encoders.py run --out studies/s1_encoders.json      needs scikit-learn, which has the digits
    python studies/s1_encoders.py report studies/s1_encoders.json --markdown docs/encoders.md
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from paired import Difference
from torch import Tensor, nn
from torch.nn import functional as F

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, load_record, save_record
from deadweight.threads import one_thread
from deadweight.train.data import batch, windows
from deadweight.train.masking import hide_tokens
from deadweight.train.objective import Objective
from deadweight.train.optimizer import make_optimizer, set_learning_rate
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForMaskedLM
from deadweight.transformer.patches import PatchClassifier
from deadweight.transformer.shape import BIASES

app = typer.Typer(add_completion=False, help=__doc__)
SIZES = {
    "d_model": 64,
    "n_layers": 2,
    "heads": 4,
    "causal": False,
    "norm_place": "post",
    "embedding_norm": True,
    "init_std": 0.1,
}
ALL = [b for b in BIASES if b not in ("gate", "readout")]
VARIANTS: dict[str, tuple[str, ...]] = {
    "all biases": (),
    "without b_K": ("key",),
    "without b_Q": ("query",),
    "without b_V": ("value",),
    "without b_2": ("down",),
    "without b_Q and b_2": ("query", "down"),
    "without b_1": ("up",),
    "norm shifts only": ("query", "key", "value", "output", "up", "down"),
}
CONTEXT = 16  # bytes: in so short a window masked bytes are learned in a minute
FREE = ("without b_K", "without b_Q", "without b_V", "without b_2", "without b_Q and b_2")  # nothing is lost, by proof
TASKS = {
    "masked bytes": Train(steps=600, batch=64, learning_rate=3e-3),
    "digits": Train(steps=300, batch=64, learning_rate=2e-3),
}


class Task:
    """What a model is trained on: a loss for each step, and a loss and an accuracy on what it has not seen."""

    def __init__(self, name: str, seed: int, variant: str) -> None:
        biases = [b for b in ALL if b not in VARIANTS[variant]]
        self.train = TASKS[name]
        self.seed, self.name = seed, name
        if name == "digits":
            self.images, self.classes = digits()
            config = TransformerConfig(**SIZES, biases=biases, context=16, vocab_size=1)
            self.model: nn.Module = PatchClassifier(config, patch=2, channels=1, classes=10)
        else:
            self.text = np.frombuffer(embedded.prose().encode(), dtype=np.uint8)
            config = TransformerConfig(**SIZES, biases=biases, context=CONTEXT, vocab_size=257)
            self.model = TransformerForMaskedLM(config)
        self.context = config.context
        start(self.model, seed)

    def loss(self, step: int) -> Tensor:
        if self.name == "digits":
            drawn = np.random.default_rng((self.seed, step)).integers(0, self.cut, size=self.train.batch)
            return F.cross_entropy(self.model(self.images[drawn]), self.classes[drawn])
        text = self.text[: self.cut]
        drawn = batch(text, step, self.seed, self.train.batch, self.context)
        loss: Tensor = Objective(self.model)(hide_tokens(drawn, 257, self.seed, step))  # type: ignore[arg-type]
        return loss

    @property
    def cut(self) -> int:
        """Where the part begins that is not trained on."""
        return len(self.images) * 3 // 4 if self.name == "digits" else len(self.text) * 95 // 100

    @torch.no_grad()
    def judged(self) -> dict[str, float]:
        if self.name == "digits":
            logits, classes = self.model(self.images[self.cut :]), self.classes[self.cut :]
            right = (logits.argmax(1) == classes).double().mean()
            return {"loss": float(F.cross_entropy(logits, classes)), "accuracy": float(right)}
        every = hide_tokens(windows(self.text[self.cut :], self.context), 257, seed=0, step=0)
        objective = Objective(self.model)  # type: ignore[arg-type]
        total = sum(float(objective(part)) * len(part) for part in every.split(128))
        return {"loss": total / len(every)}


def start(model: nn.Module, seed: int) -> None:
    """Initial weights that depend on the seed and the module's name alone; biases begin at zero."""
    for name, module in model.named_modules():
        torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        model.get_submodule("transformer").initialise(module)  # type: ignore[operator]


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of 8 × 8 pixels that scikit-learn ships, in an order of our own."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DeadweightError(
            "the digits come with scikit-learn, which is missing: pip install scikit-learn"
        ) from error
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    images = torch.tensor(found.images[order], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target[order])


def trained(name: str, seed: int, variant: str) -> dict[str, float]:
    """Train one model, and judge it."""
    task = Task(name, seed, variant)
    optimizer = make_optimizer(task.model, task.train, torch.device("cpu"))
    for step in range(task.train.steps):
        set_learning_rate(optimizer, learning_rate(task.train, step))
        loss = task.loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), task.train.clip)
        optimizer.step()
    return task.judged()


@app.command()
def run(out: OutOption, seeds: Annotated[int, typer.Option(help="Seeds of every variant.")] = 5) -> None:
    """Train every variant that the record does not have yet."""
    digits()  # missing images are reported before any work
    record = load_record(out) or {"runs": {task: {} for task in TASKS}}
    record["setting"] = {"seeds": seeds, **circumstances()}
    with one_thread():
        for seed in range(seeds):
            for task in TASKS:
                for variant in VARIANTS:
                    have = record["runs"][task].setdefault(variant, [])
                    if len(have) == seed:
                        have.append(trained(task, seed, variant))
                        save_record(out, record, indent=None)
                print(f"{task}, seed {seed}: {record['runs'][task]['all biases'][seed]}", flush=True)


def losses(record: dict[str, Any], task: str, variant: str) -> list[float]:
    return [r["loss"] for r in record["runs"][task][variant]]


def against_all(record: dict[str, Any], task: str, variant: str) -> Difference:
    """The difference to all biases over pairs of one seed, in nats."""
    pairs = [a - b for a, b in zip(*(losses(record, task, v) for v in (variant, "all biases")), strict=True)]
    return Difference(statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def decides(gap: Difference) -> str:
    if gap.is_better or gap.is_worse:
        return "better" if gap.is_better else "worse"
    return f"not distinguishable (± {gap.margin:.4f})"


def verdicts(record: dict[str, Any]) -> Iterator[str]:
    for task in record["runs"]:
        gaps = {v: against_all(record, task, v) for v in VARIANTS if v != "all biases"}
        pairs = zip(*(losses(record, task, v) for v in ("without b_K", "all biases")), strict=True)
        off = max(abs(a - b) for a, b in pairs)
        folds = [v for v in FREE if v != "without b_K"]
        worse = [v for v in folds if gaps[v].is_worse]
        most = max(gaps[v].mean + gaps[v].margin for v in folds)
        said = f"Not seen here: {', '.join(worse)}" if worse else f"No harm seen; {most:.4f} is not excluded"
        listed = ", ".join(f"{v} {gaps[v]}" for v in folds)
        others = [gaps[v] for v in ("without b_1", "norm shifts only")]
        earned = "Holds" if any(gap.is_worse for gap in others) else "Not seen here"
        yield (
            f"- *The key bias makes no difference ({task}).* **{'Holds' if off < 1e-3 else 'Not seen here'}.** No pair "
            f"differs by more than {off:.1e}."
        )
        yield f"- *What folds can be left out from the start ({task}).* **{said}.** {listed}."
        yield (
            f"- *Biases that do not fold earn their place ({task}).* **{earned}.** Without b_1 {others[0]}, with norm "
            f"shifts only {others[1]}; {max(gap.mean + gap.margin for gap in others):.4f} is not excluded."
        )


def written(record: dict[str, Any]) -> str:
    s = record["setting"]
    lines = [
        "# Biases of encoders, trained from scratch",
        "",
        "This page tests the rules about biases on small post-norm encoders: a BERT on masked bytes, and a ViT on the "
        "digits that scikit-learn ships. By proof the key bias is dead, the value bias folds into the output bias, and "
        "b_2 and b_Q fold into the shift of the norm before. `studies/s1_encoders.py` trains with and without them.",
        "",
        "## Verdicts",
        "",
        f"Differences in nats ± standard error, over pairs of one of {s['seeds']} seeds. A verdict counts if zero is "
        "outside the 95 % interval.",
        "",
        *verdicts(record),
        "",
        "## Measurements",
        "",
        f"{SIZES['n_layers']} layers of width {SIZES['d_model']}, {SIZES['heads']} heads, LayerNorm after each sum, "
        "learned positions; AdamW, float32, "
        + ", ".join(f"{t}: {x.steps} steps of {x.batch}, rate {x.learning_rate:g}" for t, x in TASKS.items())
        + f"; torch {s['torch']}, {s['machine']}. Held-out loss in nats, mean ± standard deviation over seeds.",
        "",
    ]
    for task, runs in record["runs"].items():
        lines += [f"### {task[0].upper()}{task[1:]}", "", "| variant | loss | accuracy | to all biases | decides |"]
        lines.append("| --- " * 5 + "|")
        for variant, each in runs.items():
            gap = None if variant == "all biases" else against_all(record, task, variant)
            right = f"{statistics.mean(r['accuracy'] for r in each):.1%}" if "accuracy" in each[0] else "–"
            values = losses(record, task, variant)
            loss = f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
            lines.append(f"| {variant} | {loss} | {right} | {gap or ''} | {decides(gap) if gap else ''} |")
        lines.append("")
    return "\n".join([*lines, "![differences to all biases](encoders.svg)", ""])


def figure(record: dict[str, Any], file: Path) -> None:
    """Differences to all biases with 95 % intervals, one panel per task."""
    picture, axes = pyplot().subplots(1, len(record["runs"]), figsize=(10, 3.2), layout="constrained", sharey=True)
    names = [v for v in VARIANTS if v != "all biases"]
    for panel, task in zip(axes, record["runs"], strict=True):
        for place, variant in enumerate(names):
            gap = against_all(record, task, variant)
            panel.errorbar([gap.mean], [place], xerr=[gap.margin], fmt="o", color="C0" if variant in FREE else "C1")
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set_title(task, fontsize=9)
        panel.set_xlabel("nats above all biases, 95 % interval", fontsize=8)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
