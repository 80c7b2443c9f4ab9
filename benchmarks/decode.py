"""How fast a model decodes from a coded cache beside its original, how long its context may be, and what prefill costs.

python benchmarks/decode.py run --config LLaMA-1B --shapes 64x16384,1x131072
python benchmarks/decode.py run --config LLaMA-8B --shapes 32x16384
python benchmarks/decode.py attention --config LLaMA-1B --shapes 64x16384,1x131072
python benchmarks/decode.py report --markdown docs/decode.md

A step is one token for every row of the batch, from a cache of random numbers that is full from the start, compiled by
torch.compile and captured as a CUDA graph, for all alike. All are timed in turns; the median over the turns counts. The
original is given the attentions of torch that take no mask. Weights and maps are random, which changes nothing but the
text. The coded cache has a quarter of the bytes, or the share that is given, scales included. `attention` times the
attention of one layer alone, for a share of the bytes that fills whole units.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deadweight.compress.bit_allocation import fields_for, give_bits
from deadweight.report import record
from deadweight.slim.cache import CodedLayer
from deadweight.slim.coded_attention import NAME
from deadweight.slim.coder import Coder
from deadweight.slim.codes import UNIT, in_low_half
from deadweight.slim.format import CacheSpec, UnitRun
from deadweight.slim.install_caches import install_caches
from deadweight.slim.kernels import decode_token

RESULTS = Path(__file__).parent / "results" / "decode.json"
ON_CPU = RESULTS.with_name("decode_cpu.json")  # of decode_cpu.py
BARE = "sdpa_without_mask"
CONFIGS: dict[str, dict[str, int]] = {
    "LLaMA-1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "LLaMA-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
}
THETA = 500000.0  # of rotary positions, as in LLaMA 3
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Row:
    """One way to decode at one shape; a step of 0 tokens is the search for the longest context."""

    model: str
    shape: str
    method: str
    kind: str  # decode, prefill or longest
    share: float  # of a 16-bit cache
    milliseconds: float
    bytes_read_per_second: float  # of the cache
    longest: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.shape, self.method, self.kind


def no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(BARE, sdpa_attention_forward)
AttentionMaskInterface.register(BARE, no_mask)
ORIGINALS = {
    "original, cuDNN attention of torch": SDPBackend.CUDNN_ATTENTION,
    "original, flash attention of torch": SDPBackend.FLASH_ATTENTION,
}
CODED = "coded cache"


def random_model(config: str) -> Any:
    with torch.device("cuda"):
        rope = {"rope_type": "default", "rope_theta": THETA}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS[config], rope_parameters=rope))
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def unit_widths(key_fields: int, value_fields: int) -> tuple[int, ...]:
    """Equal bits for all codes of a unit, as far as its halves allow."""
    low = in_low_half(key_fields, value_fields)
    widths = [0] * len(low)
    for half in (True, False):
        members = [i for i, is_low in enumerate(low) if is_low == half]
        for i, width in zip(members, give_bits(torch.ones(len(members), 1), UNIT // 2)[:, 0].tolist(), strict=True):
            widths[i] = width
    return tuple(widths)


def random_spec(config: Any, units: int) -> CacheSpec:
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    d = config.hidden_size // heads
    fields = fields_for(units, d, d)
    run = (UnitRun(units, unit_widths(*fields)),)
    return CacheSpec(heads, key_heads, d, d, d // 2, 4, *fields, (run,) * key_heads)


def units_of_layers(config: Any, share: float) -> list[int]:
    """Multiples of eight units for every layer, together at most the share."""
    d, layers = config.hidden_size // config.num_attention_heads, config.num_hidden_layers
    most = layers * (share * 4 * d - 1) / 2  # units of a head in all layers
    each = int(most / layers) // 8 * 8
    more = int((most - each * layers) // 8)
    return [each] * (layers - more) + [each + 8] * more


def coded_twin(model: Any, share: float, structure: str) -> Any:
    """The same model, with the same weights, and a coded cache with random maps."""
    import copy

    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    units = units_of_layers(model.config, share)
    specs = {f"model.layers.{i}.self_attn": random_spec(model.config, n) for i, n in enumerate(units)}
    install_caches(twin, specs)
    AttentionMaskInterface.register(NAME, no_mask)
    for path in specs:
        randomise(twin.get_submodule(path).coder, structure)
    return twin


def randomise(coder: Coder, structure: str) -> None:
    """Random maps. With two blocks for each head, codes in lower halves of units are those of the faster pairs."""
    coder.cuda()
    for name in ("key_encode", "key_decode", "predict", "value_encode", "value_decode"):
        getattr(coder, name).normal_(std=0.1)
    spec = coder.spec
    coder.pair_places.copy_(torch.arange(2 * spec.pairs))
    coder.rates.copy_((THETA ** (-torch.arange(spec.pairs) / spec.pairs)).view(torch.int32))
    if structure == "half":
        low = torch.tensor(in_low_half(spec.key_fields, 0)).repeat_interleave(spec.n_units)
        fast = (torch.arange(spec.set_keys) % spec.pairs) < spec.pairs // 2
        coder.key_decode.mul_((low[:, None] == fast).to(coder.key_decode))


class FilledLayer(DynamicLayer):
    """Random keys and values, or codes, of so many tokens from the start; every step writes the last of them again."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(*x.shape[:2], self.length, x.shape[3], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        for states in (self.keys, self.values):
            if states.dtype != torch.uint8:
                states.normal_()
        if self.keys.dtype == torch.uint8:  # scales are left at 1
            self.keys.random_(0, 256)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, self.length - 1 :] = key_states
        self.values[:, :, self.length - 1 :] = value_states
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return self.length - 1


def filled_cache(length: int) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = partial(FilledLayer, length)
    return cache


@contextlib.contextmanager
def attention_of(model: Any, method: str) -> Iterator[None]:
    if method == CODED:
        yield
        return
    model.set_attn_implementation(BARE)
    with sdpa_kernel(ORIGINALS[method]):
        yield


class Step:
    """One token for every row of the batch, as a CUDA graph of the compiled model."""

    def __init__(self, model: nn.Module, method: str, batch: int, length: int, *, compiled: bool = True) -> None:
        self.model, self.method, self.cache = model, method, filled_cache(length)
        self.inputs = {
            "input_ids": torch.zeros(batch, 1, dtype=torch.long, device="cuda"),
            "position_ids": torch.full((batch, 1), length - 1, device="cuda"),
        }
        self.call: Any = model
        self.run_once()  # the cache takes its memory
        for layer in self.cache.layers:
            if isinstance(layer, CodedLayer):  # its sequences begin with the first row, not with this token
                layer.start = layer.zero = torch.zeros_like(layer.start)
                layer.started = torch.ones_like(layer.started)
        if compiled:
            self.call = torch.compile(model, dynamic=False)

    @torch.no_grad()
    def run_once(self) -> Tensor:
        with attention_of(self.model, self.method):
            logits: Tensor = self.call(**self.inputs, past_key_values=self.cache, use_cache=True).logits
        return logits

    def captured(self) -> Callable[[], None]:
        return captured(self.run_once, self.keep_tensors)

    def keep_tensors(self) -> None:
        """A step replaces some of the tensors that its graph reads."""
        self.read_by_graph = [dict(vars(layer)) for layer in self.cache.layers]

    def cache_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.cache.layers for x in (layer.keys, layer.values))


def milliseconds(job: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        job()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def cleaned() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def decode_rows(name: str, models: dict[str, Any], shape: str, turns: int, originals: list[str]) -> list[Row]:
    batch, length = map(int, shape.split("x"))
    torch._dynamo.reset()
    steps, jobs = {}, {}
    for method in (CODED, *originals):
        try:
            step = Step(models["coded" if method == CODED else "original"], method, batch, length)
            jobs[method], steps[method] = step.captured(), step
        except RuntimeError as error:  # out of memory, or no such attention
            typer.echo(f"{method}: left out ({str(error).splitlines()[0][:150]})")
        cleaned()
    times: dict[str, list[float]] = {method: [] for method in jobs}
    for _ in range(turns):
        for method, job in jobs.items():
            job()
            times[method].append(milliseconds(job, 10))
    d = models["original"].config.hidden_size // models["original"].config.num_attention_heads
    whole = 4 * d * models["original"].config.num_key_value_heads * models["original"].config.num_hidden_layers
    rows = []
    for method, step in steps.items():
        ms, size = statistics.median(times[method]), step.cache_bytes()
        share = size / (whole * batch * length)
        rows.append(Row(name, shape, method, "decode", round(share, 4), round(ms, 4), size / ms * 1e3))
        typer.echo(f"{name} {shape} {method}: {ms:.3f} ms, {batch / ms * 1e3:,.0f} tokens/s, {share:.1%} of the bytes")
    return rows


def prefill_rows(name: str, models: dict[str, Any], shape: str, turns: int) -> list[Row]:
    batch, length = map(int, shape.split("x"))
    ids = torch.randint(0, 1000, (batch, length), device="cuda")
    times: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for method in ("original, flash attention of torch", CODED):
            model = models["coded" if method == CODED else "original"]
            with torch.no_grad(), attention_of(model, method):
                job = partial(model, ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
                ms = milliseconds(job, 1)
            times.setdefault(method, []).extend([ms] if turn else [])
    rows = [Row(name, shape, m, "prefill", 0.0, round(statistics.median(t), 3), 0.0) for m, t in times.items()]
    for row in rows:
        typer.echo(f"{name} prefill {shape} {row.method}: {row.milliseconds:.1f} ms")
    return rows


def longest_rows(name: str, models: dict[str, Any], batch: int) -> list[Row]:
    """The longest context of which a step really runs, to a fiftieth, found by halving."""
    rows = []
    for method in (CODED, "original, cuDNN attention of torch"):
        model = models["coded" if method == CODED else "original"]
        config = model.config
        d = config.hidden_size // config.num_attention_heads
        per_token = 4 * d * config.num_key_value_heads * config.num_hidden_layers * (0.25 if method == CODED else 1)
        cleaned()
        low, high = 0, int((torch.cuda.mem_get_info()[0]) / (batch * per_token))
        while high - low > high // 50:
            middle = high - (high - low) // 8 if low == 0 else (low + high) // 2
            try:
                Step(model, method, batch, middle, compiled=False)
                torch.cuda.synchronize()
                low = middle
            except torch.OutOfMemoryError:
                high = middle
            cleaned()
        rows.append(Row(name, f"{batch}x{low}", method, "longest", 0.0, 0.0, 0.0, low))
        typer.echo(f"{name}, batch {batch}, {method}: {low:,} tokens fit")
    return rows


def copy_speed() -> float:
    """Bytes read and written in a second by a copy."""
    a, b = torch.empty(2, 1 << 31, dtype=torch.uint8, device="cuda")
    b.copy_(a)
    return float(2 * a.numel() / milliseconds(lambda: b.copy_(a), 20) * 1e3)


@app.command()
def run(
    config: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "LLaMA-1B",
    shapes: Annotated[str, typer.Option(help="batch x context, by comma")] = "64x16384,1x131072",
    share: float = 0.25,
    keys: Annotated[str, typer.Option(help="Which keys a map mixes: those of a head, or of half a head.")] = "half",
    prefill: Annotated[str, typer.Option(help="batch x context, or nothing")] = "4x4096",
    fit: Annotated[int, typer.Option(help="batch whose longest context is looked for; 0: none")] = 0,
    original: Annotated[list[str], typer.Option(help="Attentions of the original, several times: cuDNN, flash.")] = [  # noqa: B006
        "cuDNN",
        "flash",
    ],
    turns: int = 5,
    results: Path = RESULTS,
) -> None:
    """Time original and coded cache, in turns."""
    torch.manual_seed(0)
    rows = [Row(**r) for r in record.read_rows(results)[1]] if results.exists() else []
    setting = record.circumstances() | {"copy": copy_speed()}
    with torch.no_grad():
        plain = random_model(config)
        models = {"original": plain, "coded": coded_twin(plain, share, keys)}
    chosen = [method for method in ORIGINALS if any(name in method for name in original)]
    jobs: list[Callable[[], list[Row]]] = [
        partial(decode_rows, config, models, s, turns, chosen) for s in shapes.split(",")
    ]
    jobs += [partial(prefill_rows, config, models, prefill, turns)] if prefill else []
    jobs += [partial(longest_rows, config, models, fit)] if fit else []
    for job in jobs:
        new = job()
        again = {r.key for r in new}
        rows = [r for r in rows if r.key not in again] + new
        record.write_rows(results, setting, rows)
        cleaned()


@app.command()
@torch.no_grad()
def attention(
    config: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "LLaMA-1B",
    shapes: Annotated[str, typer.Option(help="batch x context, by comma")] = "64x16384,1x131072",
    share: float = 0.25,
    keys: Annotated[str, typer.Option(help="half, head, or both by comma")] = "half,head",
    turns: int = 5,
    results: Path = RESULTS,
) -> None:
    """Time the attention of one layer, and what it reads in a second."""
    rows = [Row(**r) for r in record.read_rows(results)[1]] if results.exists() else []
    setting = record.circumstances() | {"copy": copy_speed()}
    for shape in shapes.split(","):
        for structure in keys.split(","):
            row = attention_row(config, shape, share, structure, turns)
            typer.echo(
                f"{config} {shape} {row.method}: {1e3 * row.milliseconds:.0f} µs, {row.share:.1%} of the bytes, "
                f"{row.bytes_read_per_second / setting['copy']:.0%} of a copy's speed"
            )
            rows = [r for r in rows if r.key != row.key] + [row]
            record.write_rows(results, setting, rows)
            cleaned()


def attention_row(config: str, shape: str, share: float, structure: str, turns: int) -> Row:
    batch, length = map(int, shape.split("x"))
    model = transformers.LlamaConfig(**CONFIGS[config])
    d = model.hidden_size // model.num_attention_heads
    coder = Coder(random_spec(model, round(share * 2 * d)))
    randomise(coder, structure)
    spec = coder.spec
    rows = torch.randint(0, 256, (batch, spec.n_sets, length, 2 * spec.n_units), dtype=torch.uint8, device="cuda")
    scales = torch.zeros(batch, spec.n_sets, length, 1, dtype=torch.uint8, device="cuda")
    query = torch.randn(batch, spec.heads, 1, d, dtype=torch.bfloat16, device="cuda")
    first = [torch.randn(batch, spec.key_heads, spec.first, d, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    new = [x[:, :, :1].contiguous() for x in first]
    zeros = torch.zeros(batch, dtype=torch.long, device="cuda")
    span = [torch.tensor([length - 1], device="cuda"), zeros, zeros]
    job = captured(partial(decode_token, coder.number, query, rows, scales, None, first, new, span, d**-0.5))
    ms = statistics.median(milliseconds(job, 20) for _ in range(turns))
    size = rows.numel() + scales.numel()
    whole = 4 * d * spec.key_heads * batch * length
    method = f"coded cache, keys by {structure}"
    return Row(config, shape, method, "attention", round(size / whole, 4), round(ms, 4), size / ms * 1e3)


def captured(job: Callable[[], Any], before: Callable[[], None] | None = None) -> Callable[[], None]:
    """The job as a CUDA graph; `before` is called once it has run twice."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            job()
    torch.cuda.current_stream().wait_stream(side)
    if before is not None:
        before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph.replay


@app.command()
def report(results: Path = RESULTS, markdown: Annotated[Path | None, typer.Option()] = None) -> None:
    """The page of a record."""
    setting, raw = record.read_rows(results)
    text = page(setting, [Row(**r) for r in raw])
    if markdown is None:
        typer.echo(text)
    else:
        markdown.write_text(text, encoding="utf-8")


def page(setting: dict[str, Any], rows: list[Row]) -> str:
    from decode_report import decode_page

    return decode_page(setting, [asdict(row) for row in rows], record.read_rows(ON_CPU))


if __name__ == "__main__":
    app()
