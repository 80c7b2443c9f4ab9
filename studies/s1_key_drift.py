"""Why do key biases that change nothing grow? Trained from scratch in several precisions and with several optimisers.

Without rotary positions the key bias has no effect, so its gradient is zero over the real numbers. The embedded model
was trained with one, and its key biases have a norm of 147. The suspicion: the gradient is rounding noise, and Adam
divides it by its own size, so that noise of any size becomes steps of the size of the learning rate. Then

- in float64 the noise is below Adam's ε and the bias stays, but with a smaller ε it grows again;
- a larger ε, SGD, or weight decay on the bias keep it small;
- if the signs of the noise were random, the bias would grow like the square root of the steps; if rounding has a
  preferred direction, like the steps themselves.

All runs have a constant learning rate behind a short warm-up, so that the growth has one exponent. *Coherence* is the
length of the way from the start, divided by the length of the path: 1 if every step has the same direction.

    python studies/s1_key_drift.py run --out studies/s1_key_drift.json
    python studies/s1_key_drift.py report studies/s1_key_drift.json --markdown docs/key-drift.md
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from s1_key_drift_page import figure, summary, written
from torch import Tensor
from torch.nn import functional as F

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.report.record import OutOption, add_report, circumstances, load_record, save_record
from deadweight.threads import one_thread
from deadweight.train.data import batch, windows
from deadweight.transformer import TransformerConfig, TransformerForCausalLM
from deadweight.transformer.shape import BIASES

app = typer.Typer(add_completion=False, help=__doc__)
SHAPE = {"d_model": 64, "n_layers": 2, "heads": 2, "context": 64, "vocab_size": 256}
BATCH, RATE, WARMUP, CLIP, LOGGED = 8, 4e-3, 20, 1.0, 20
BETAS = (0.9, 0.95)
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Condition:
    """How a run is trained. `decay` is the weight decay of the biases; matrices always have 0.1."""

    precision: str = "float32"
    optimizer: str = "AdamW"
    epsilon: float = 1e-8
    decay: float = 0.0
    key_bias: bool = True
    device: str = "cpu"


CONDITIONS: dict[str, Condition] = {
    "float32": Condition(),
    "float32, no key bias": Condition(key_bias=False),
    "bfloat16": Condition("bfloat16"),
    "bfloat16, no key bias": Condition("bfloat16", key_bias=False),
    "float64": Condition("float64"),
    "float64, ε 1e-30": Condition("float64", epsilon=1e-30),
    "float32, SGD": Condition(optimizer="SGD"),
    "bfloat16, SGD": Condition("bfloat16", optimizer="SGD"),
    "float32, ε 1e-7": Condition(epsilon=1e-7),
    "float32, ε 1e-6": Condition(epsilon=1e-6),
    "float32, ε 1e-5": Condition(epsilon=1e-5),
    "float32, ε 1e-4": Condition(epsilon=1e-4),
    "float32, ε 1e-3": Condition(epsilon=1e-3),
    "bfloat16, ε 1e-6": Condition("bfloat16", epsilon=1e-6),
    "bfloat16, ε 1e-4": Condition("bfloat16", epsilon=1e-4),
    "bfloat16, ε 1e-3": Condition("bfloat16", epsilon=1e-3),
    "float32, decay 0.1": Condition(decay=0.1),
    "bfloat16, decay 0.1": Condition("bfloat16", decay=0.1),
    "float32, GPU": Condition(device="cuda"),
    "bfloat16, GPU": Condition("bfloat16", device="cuda"),
}
SGD_RATE, MOMENTUM = 0.3, 0.9


def make_model(condition: Condition, seed: int) -> TransformerForCausalLM:
    """Initial weights depend on the seed alone: the model without a key bias starts from the same ones."""
    biases = [b for b in BIASES if b not in ("gate", "readout")]
    torch.manual_seed(seed)
    whole = TransformerForCausalLM(TransformerConfig(**SHAPE, biases=biases))
    if not condition.key_bias:
        config = TransformerConfig(**SHAPE, biases=[b for b in biases if b != "key"])
        start, whole = whole.state_dict(), TransformerForCausalLM(config)
        whole.load_state_dict({n: start[n] for n in whole.state_dict()})
    whole = whole.to(condition.device).train()
    return whole.double() if condition.precision == "float64" else whole


def make_optimizer(model: TransformerForCausalLM, condition: Condition) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
    decays = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": condition.decay}]
    if condition.optimizer == "SGD":
        return torch.optim.SGD([{**g, "weight_decay": 0.0} for g in decays], lr=SGD_RATE, momentum=MOMENTUM)
    return torch.optim.AdamW(decays, lr=RATE, betas=BETAS, eps=condition.epsilon)


def loss_of(model: TransformerForCausalLM, tokens: Tensor, precision: str) -> Tensor:
    tokens = tokens.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext():
        logits = model(tokens[:, :-1], use_cache=False).logits
    wide = logits if precision == "float64" else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())


def biases_of(model: TransformerForCausalLM, kind: str) -> list[Tensor]:
    return [p for n, p in model.named_parameters() if n.endswith(f"{kind}.bias")]


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def train_one(condition: Condition, seed: int, steps: int, text: np.ndarray[Any, Any]) -> dict[str, Any]:
    """One run: norm of the key bias, length of its path, gradients, and the loss on held-out text."""
    cut = len(text) * 95 // 100
    model = make_model(condition, seed)
    optimizer = make_optimizer(model, condition)
    peak = SGD_RATE if condition.optimizer == "SGD" else RATE
    keys, queries = biases_of(model, "key"), biases_of(model, "query")
    path, squares, total, told = 0.0, 0.0, None, []
    where = circumstances()["machine"] if condition.device == "cuda" else None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        loss_of(model, batch(text[:cut], step, seed, BATCH, SHAPE["context"]), condition.precision).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before, gradient = joined(keys) if keys else None, joined([k.grad for k in keys]) if keys else None
        query = joined([q.grad for q in queries])
        optimizer.step()
        if before is None or gradient is None:
            continue
        path += float((joined(keys) - before).norm())
        squares += float(gradient.square().sum())
        total = gradient if total is None else total + gradient
        if (step + 1) % max(1, steps // LOGGED) == 0:
            told.append([step + 1, float(joined(keys).norm()), float(gradient.norm()), float(query.norm())])
    with torch.no_grad():
        parts = windows(text[cut:], SHAPE["context"]).split(64)
        ends = [float(loss_of(model, part, condition.precision)) * len(part) for part in parts]
    run: dict[str, Any] = {"seed": seed, "machine": where} if where else {"seed": seed}
    run |= {"valid_loss": sum(ends) / sum(map(len, parts)), "query_norm": float(joined(queries).norm())}
    if total is not None:
        coherence = float(joined(keys).norm()) / path if path else 0.0
        # of n independent gradients the sum is √n times as long as one: 1 means no preferred direction
        preference = float(total.norm()) / math.sqrt(squares) if squares else 0.0
        run |= {"log": told, "path": path, "coherence": coherence, "gradient_sum": preference}
        run["alignment"] = alignment(model, windows(text[cut:], SHAPE["context"])[:64])
    return run


@torch.no_grad()
def alignment(model: TransformerForCausalLM, tokens: Tensor) -> list[float]:
    """The cosine between the key bias and the mean query, head by head."""
    cosines: list[float] = []
    for layer in model.transformer.layers:
        seen: list[Tensor] = []
        hook = layer.attention.query.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        model(tokens[:, :-1].to(model.device), use_cache=False)
        hook.remove()
        mean = seen[0].flatten(0, 1).mean(0).double().view(SHAPE["heads"], -1)
        key = layer.attention.key.bias.double().view(SHAPE["heads"], -1)
        cosines += F.cosine_similarity(mean, key, dim=1).tolist()
    return cosines


@app.command()
def run(
    out: OutOption,
    steps: Annotated[int, typer.Option(help="Steps of every run.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Seeds of every condition.")] = 3,
) -> None:
    """Train every condition that the record does not have yet."""
    text = np.frombuffer(embedded.prose().encode(), dtype=np.uint8)
    record = load_record(out) or {"runs": {}}
    sizes = {**SHAPE, "batch": BATCH, "rate": RATE}
    setting = {"steps": steps, "seeds": seeds, "bytes": len(text), **sizes}
    before = record.setdefault("setting", {**setting, **circumstances()})  # a GPU's runs name their machine themselves
    if different := [key for key in setting if before[key] != setting[key]]:
        raise DeadweightError(f"{out} was made with another {different[0]}; expected the same: name another file")
    with one_thread():
        for name, condition in CONDITIONS.items():
            if condition.device == "cuda" and not torch.cuda.is_available():
                continue
            have = record["runs"].setdefault(name, [])
            for seed in range(len(have), seeds):
                have.append(train_one(condition, seed, steps, text))
                save_record(out, record, indent=None)
            print(f"{name}: {summary(record, name)}", flush=True)
        record["embedded"] = record.get("embedded") or embedded_cost()
    save_record(out, record, indent=None)


def embedded_cost(n_windows: int = 48) -> dict[str, Any]:
    """The embedded model with and without its key biases, in several precisions and with rounded keys."""
    text = embedded.tokens(embedded.prose())
    step = len(text) // n_windows
    ids = torch.tensor([text[i * step : i * step + 256] for i in range(n_windows)])
    rows: dict[str, Any] = {"norms": [], "bits": {}}
    for zeroed in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path()).eval()
        for block in model.transformer.h:
            width = block.attn.c_attn.bias.shape[0] // 3
            key = block.attn.c_attn.bias.data[width : 2 * width]
            if zeroed:
                key.zero_()
            else:
                rows["norms"].append(float(key.norm()))
        for name, (dtype, bits) in ROUNDINGS.items():
            rows["bits"].setdefault(name, {})["zeroed" if zeroed else "as trained"] = judged(model, ids, dtype, bits)
    rows["alignment"] = embedded_alignment(ids[:8])
    settings = json.loads((embedded.path() / "training.json").read_text(encoding="utf-8"))["settings"]
    rows["settings"] = {k: settings[k] for k in ("steps", "lr", "warmup", "batch")}
    return rows


@torch.no_grad()
def embedded_alignment(ids: Tensor) -> list[float]:
    """The cosine between key bias and mean query in the embedded model, head by head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float64).eval()
    cosines: list[float] = []
    for block in model.transformer.h:
        seen: list[Tensor] = []
        hook = block.attn.c_attn.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        model(ids)
        hook.remove()
        query, heads = seen[0].chunk(3, -1)[0].flatten(0, 1).mean(0), model.config.n_head
        key = block.attn.c_attn.bias.chunk(3)[1]
        cosines += F.cosine_similarity(query.view(heads, -1), key.view(heads, -1), dim=1).tolist()
    return cosines


ROUNDINGS: dict[str, tuple[torch.dtype, int | None]] = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "keys in 8 bits": (torch.float32, 8),
    "keys in 4 bits": (torch.float32, 4),
}


@torch.no_grad()
def judged(model: Any, ids: Tensor, dtype: torch.dtype, bits: int | None) -> float:
    """Bits per byte with weights and activations in this precision, and keys rounded to one scale per token."""
    hooks = []
    model = model.to(dtype)
    for block in model.transformer.h if bits else ():
        hooks.append(block.attn.c_attn.register_forward_hook(key_rounding(bits)))
    logits = torch.cat([model(part).logits[:, :-1] for part in ids.split(16)]).double()
    for hook in hooks:
        hook.remove()
    return float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())) / math.log(2)


def key_rounding(bits: int | None) -> Callable[..., Tensor]:
    """A hook that rounds the keys of a fused projection: one scale per token, symmetric around zero."""

    def hook(_: torch.nn.Module, __: object, output: Tensor) -> Tensor:
        query, key, value = output.chunk(3, -1)
        step = key.abs().amax(-1, keepdim=True) / (2 ** ((bits or 8) - 1) - 1)
        return torch.cat([query, (key / step).round() * step, value], -1)

    return hook


add_report(app, written, figure)

if __name__ == "__main__":
    app()
