"""Train the small byte-level GPT-2 that deadweight carries as its default model.

    python scripts/train_embedded.py enwik8.xz src/deadweight/embedded/model

TEXT is plain text, or a MediaWiki XML dump that is stripped to prose here; `.xz` is unpacked. OUT receives
config.json, model.safetensors (float32) and training.json. One token is one byte.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import math
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from deadweight.train.schedule import warm_cosine

CONTEXT = 256  # bytes
HELD_OUT = 0.05  # the last share of the prose, never trained on

ARTICLE = re.compile(r"<text xml:space=\"preserve\">(.*?)</text>", re.DOTALL)
NOT_PROSE = re.compile(
    r"<!--.*?-->|<ref[^>]*/>|<(ref|math|table|gallery|pre|code|timeline|nowiki)\b.*?</\1>|<[^>]*>", re.DOTALL
)
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
NAMESPACE = re.compile(r":?[\w-]+:\S")  # Image:, Category:, and other languages: shown beside the text, not in it
ADDRESS = re.compile(r"\[\w+://\S+ ([^\]\n]*)\]|\[?\w+://\S+")
SENTENCES = re.compile(r"[\w\"'(][^{}|<>=]{78,}[.?!][\"')]*")


def strip_article(markup: str) -> str:
    """The paragraphs of one article as it would be read aloud, one per line; no headings, lists or tables."""
    text = NOT_PROSE.sub("", html.unescape(markup))
    n = 1
    while n:  # innermost first: templates and links nest
        text, n_templates = TEMPLATE.subn("", text)
        text, n_links = LINK.subn(lambda m: "" if NAMESPACE.match(m[1]) else m[1].rpartition("|")[2], text)
        n = n_templates + n_links
    text = ADDRESS.sub(lambda m: m[1] or "", html.unescape(text)).replace("\xa0", " ")
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r" ?\([\s,;]*\)", "", text)  # what a removed template leaves behind
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if SENTENCES.fullmatch(line))


def read_prose(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix == ".xz":
        raw = lzma.decompress(raw)
    articles = ARTICLE.findall(raw.decode("utf-8", errors="ignore"))
    if not articles:
        return raw
    with ProcessPoolExecutor() as pool:
        return "\n\n".join(filter(None, pool.map(strip_article, articles, chunksize=64))).encode()


def new_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=192,
        n_head=3,  # of 64
        n_layer=4,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def adamw(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Weight decay pulls on matrices alone: biases and norms go where the data takes them."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def bits(model: GPT2LMHeadModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean bits per byte; windows holds one byte more than the context, and every byte but the first is predicted."""
    logits = model(windows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / math.log(2)


def train(model: GPT2LMHeadModel, text: torch.Tensor, args: argparse.Namespace) -> None:
    device = text.device.type
    if device == "cuda":
        for block in model.transformer.h:  # not the whole model: compiled, its mask would keep flash attention out
            block.compile()
    optimizer = adamw(model, args.lr, args.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warm_cosine(s, args.steps, args.warmup))
    window = torch.arange(CONTEXT + 1, device=device)
    clock = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (args.batch, 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = bits(model, text[starts + window].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.every == 0:
            value, then, clock = loss.item(), clock, time.perf_counter()
            speed = args.every * args.batch * CONTEXT / (clock - then) / 1e6
            print(f"step {step:>6}/{args.steps}  {value:.4f} bits/byte  {speed:.2f} M bytes/s", flush=True)


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, text: torch.Tensor, batch: int) -> float:
    """Bits per byte in float32 over all of text, in windows that do not overlap: the mean context is half a window."""
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    total = sum(bits(model, part.long()).item() * len(part) for part in windows.split(batch))
    return total / len(windows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--batch", type=int, default=256, help="windows per step")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak, after --warmup steps; then a cosine to 0")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=500, help="steps between progress lines")
    return parser.parse_args()


def main() -> None:
    args = parse()
    start = time.perf_counter()
    prose = read_prose(args.text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray(prose), dtype=torch.uint8).to(device)
    cut = int(len(text) * (1 - HELD_OUT))
    print(f"{len(text):,} bytes of prose, read in {time.perf_counter() - start:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    model = new_model().to(device)
    started = time.perf_counter()
    train(model, text[:cut], args)
    seconds = time.perf_counter() - started
    model.save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    (args.out / "model.safetensors").chmod(0o644)  # some versions write it for the owner alone

    saved = GPT2LMHeadModel.from_pretrained(args.out).to(device).eval()
    record = {
        "settings": {k: v for k, v in vars(args).items() if k not in ("text", "out", "every")},
        "text": {"file": args.text.name, "prose_bytes": len(prose), "prose_sha256": hashlib.sha256(prose).hexdigest()},
        "parameters": saved.num_parameters(),
        "bytes_seen": args.steps * args.batch * CONTEXT,
        "held_out": {"bytes": len(text) - cut, "bits_per_byte": round(evaluate(saved, text[cut:], args.batch), 4)},
        "seconds": round(seconds, 1),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()},
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["held_out"]), f"after {seconds:.0f} s of training", flush=True)


if __name__ == "__main__":
    main()
