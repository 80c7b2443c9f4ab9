"""What decoding is measured with: models and their slim twins, a cache that is full from the start, and a clock."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deadweight.compress.assemble import assembled
from deadweight.compress.run import WIDEST, WIDEST_LATE
from deadweight.compress.truncate import Cut
from deadweight.save.facts import ZeroPlaces
from deadweight.slim import attention as slim_attention

Kind = Literal["original", "slim", "late"]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
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
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 99,
    },
}


def random_model(config: str) -> nn.Module:
    """A LLaMA of CONFIGS, or of a file, with random weights."""
    sizes = CONFIGS[config] if config in CONFIGS else json.loads(Path(config).read_text(encoding="utf-8"))
    with torch.device(DEVICE):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model.to(DTYPE).eval().requires_grad_(False)


def loaded(folder: str) -> nn.Module:
    """A model of a folder, slim or not; the code of slim ones is ours."""
    import deadweight

    model: Any = deadweight.load(folder)
    return model.to(DEVICE, DTYPE).eval().requires_grad_(False)


def slim_twin(model: Any, share: float, late: bool, like: str | None = None) -> nn.Module:
    """A LLaMA whose heads keep a share of their dimensions; they share keys and values as `compress` makes them do.

    What the weights are does not matter to their speed: rows are set to zero, not chosen. `like`: the config.json of a
    compressed model of these sizes, whose layers keep as much as that one's.
    """
    module, config = copy.deepcopy(model), model.config
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    d = config.hidden_size // heads
    shared = sharing(key_heads, d, late)
    sets, same = key_heads // shared, round(share * shared * d)
    sizes = [([same] * sets, [same] * sets)] * config.num_hidden_layers
    if like is not None:
        described = json.loads(Path(like).read_text(encoding="utf-8"))["deadweight"]["attention"]
        sizes = [(x["keys"], x["values"]) for x in described.values()]
    facts: list[Any] = []
    packings: dict[str, Any] = {}
    for n, (layer, (keys, values)) in enumerate(zip(module.model.layers, sizes, strict=True)):
        path = f"model.layers.{n}.self_attn"
        kept = [places(k, shared, d, late) for k in keys]
        gone = {
            "k_proj": [g * shared * d + x for g in range(sets) for x in range(shared * d) if x not in kept[g]],
            "v_proj": [g * shared * d + x for g, v in enumerate(values) for x in range(v, shared * d)],
        }
        for name, rows in gone.items():
            getattr(layer.self_attn, name).weight[rows] = 0.0
            facts.append(ZeroPlaces(f"{path}.{name}.weight", 0, tuple(rows)))
        tensors = {f"up_{g}": torch.randn(heads // sets, d, v) / v**0.5 for g, v in enumerate(values)}
        if late:
            tensors |= {
                "expand": torch.cat([torch.randn(shared * d * k) / k**0.5 for k in keys]),
                "shift": torch.randn(sets, shared, d),
                "plane_places": torch.arange(d, dtype=torch.int32),
                "rates": (10000.0 ** (-torch.arange(d // 2) / (d // 2))).view(torch.int32),
            }
        else:
            tensors |= {
                "query_places": torch.tensor([x % d for p in kept for x in p], dtype=torch.int32),
                "turn": torch.randn(heads // sets * sum(keys)),
            }
        packings[path] = {
            "heads": heads,
            "key_heads": key_heads,
            "merged": shared,
            "joined": shared,
            "d_qk": d,
            "d_v": d,
            "keys": list(keys),
            "values": list(values),
            "planes": [0 if late else k // 2 for k in keys],
            "still": 0,
            "late": d // 2 if late else 0,
            "chosen": not late,
            "needed": False,
            "_spare": [f"{path}.{name}" for name in gone],
            "_key_places": [x for p in kept for x in p],
            "_tensors": tensors,
        }
    return assembled(Cut(module, tuple(facts), packings))[0].eval().requires_grad_(False)


def places(kept: int, shared: int, d: int, late: bool) -> list[int]:
    """Where a set of keys holds what it keeps: the first places of planes, and their second ones."""
    numbers = [(n // shared, n % shared) for n in range(kept // 2)]  # planes that are kept, and whose
    return [*range(kept)] if late else [m * d + plane + side for side in (0, d // 2) for plane, m in numbers]


def sharing(key_heads: int, size: int, late: bool) -> int:
    """How many key heads `compress` lets share their keys and values."""
    widest = max(WIDEST_LATE, 2 * size) if late else WIDEST
    return max(m for m in range(1, key_heads + 1) if key_heads % m == 0 and (m == 1 or m * size <= widest))


class FilledCache(DynamicCache):
    """Random keys and values of so many tokens from the start; every step writes the last of them again.

    `exact`: what is not filled is not shown; else a mask must hide it. Rivals with the same states share them.
    """

    def __init__(self, length: int, filled: int, states: dict[int, tuple[Tensor, Tensor]], *, exact: bool) -> None:
        super().__init__()
        self.length, self.filled, self.states, self.exact = length, filled, states, exact

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx not in self.states:
            pair = [z.new_empty(*z.shape[:2], self.length, z.shape[3]).normal_() for z in (key_states, value_states)]
            self.states[layer_idx] = (pair[0], pair[1])
        for old, new in zip(self.states[layer_idx], (key_states, value_states), strict=True):
            old[:, :, self.filled - 1 : self.filled] = new
        shown = self.filled if self.exact else self.length
        keys, values = self.states[layer_idx]
        return keys[:, :, :shown], values[:, :, :shown]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.filled - 1

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return (self.filled if self.exact else self.length), 0


@dataclass(frozen=True)
class Rival:
    """Which model, which attention of transformers, with our kernel or not, behind a mask or on an exact cache."""

    name: str
    kind: Kind
    attention: str
    kernel: bool = False
    exact: bool = False
    backend: SDPBackend | None = None
    compiled: bool = False

    @contextlib.contextmanager
    def chosen(self, model: Any) -> Iterator[None]:
        if self.kind == "original":
            slim_attention.register()
            model.set_attn_implementation(self.attention)
        before, slim_attention.DEVICES = slim_attention.DEVICES, ("cuda",) if self.kernel else ()
        if self.exact:  # while a graph is captured transformers would make a mask of nothing
            AttentionMaskInterface.register(OURS, no_mask)
        try:
            with sdpa_kernel(self.backend) if self.backend is not None and CUDA else contextlib.nullcontext():
                yield
        finally:
            slim_attention.DEVICES = before
            slim_attention.register()


def no_mask(*_: Any, **__: Any) -> None:
    return None


OURS, BARE = slim_attention.NAME, "sdpa_without_mask"
AttentionInterface.register(BARE, sdpa_attention_forward)
AttentionMaskInterface.register(BARE, no_mask)
RIVALS = (
    Rival("original, sdpa with a mask", "original", "sdpa"),
    Rival("original, flash attention of torch", "original", BARE, exact=True, backend=SDPBackend.FLASH_ATTENTION),
    Rival("original, cuDNN attention of torch", "original", BARE, exact=True, backend=SDPBackend.CUDNN_ATTENTION),
    Rival("original, our kernel", "original", OURS, kernel=True, exact=True),
    Rival("slim, two products", "slim", OURS),
    Rival("slim, our kernel with a mask", "slim", OURS, kernel=True),
    Rival("slim, our kernel", "slim", OURS, kernel=True, exact=True),
    Rival("slim with late keys, expanded by torch", "late", OURS),
    Rival("slim with late keys, our kernel", "late", OURS, kernel=True, exact=True),
)


COMPILED = tuple(
    replace(rival, name=f"{rival.name}, compiled", compiled=True)
    for rival in RIVALS
    if rival.exact and (rival.kernel or rival.backend is SDPBackend.CUDNN_ATTENTION)
)


class Step:
    """One decoding step of a rival: captured as a CUDA graph where there is a GPU."""

    def __init__(self, rival: Rival, model: Any, batch: int, length: int, filled: int, states: Any) -> None:
        self.rival, self.model = rival, model
        self.cache = FilledCache(length, filled, states, exact=rival.exact)
        seen = torch.arange(length, device=DEVICE) < filled
        mask = None if rival.exact else seen.expand(batch, 1, 1, length).contiguous()
        self.inputs = {
            "input_ids": torch.zeros(batch, 1, dtype=torch.long, device=DEVICE),
            "position_ids": torch.full((batch, 1), filled - 1, device=DEVICE),
            "attention_mask": mask,
        }
        self.graph: Any = None
        self.call = model
        if rival.compiled:
            states or self.eager()  # so that there is a cache
            torch._dynamo.config.recompile_limit = 64  # one for every rival and shape
            how = "inductor" if CUDA else "aot_eager"  # without a GPU nothing is timed that counts
            self.call = torch.compile(model, fullgraph=True, dynamic=False, backend=how)

    @torch.no_grad()
    def eager(self) -> Tensor:
        with self.rival.chosen(self.model):
            return self.call(**self.inputs, past_key_values=self.cache, use_cache=True).logits

    def capture(self) -> Step:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.eager()
        return self

    def run(self) -> None:
        self.eager() if self.graph is None else self.graph.replay()


def seconds(job: Callable[[], Any], repeats: int) -> float:
    """The mean of several runs in a row."""
    if not CUDA:
        start = time.perf_counter()
        for _ in range(repeats):
            job()
        return (time.perf_counter() - start) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        job()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def in_turns(jobs: dict[str, Callable[[], Any]], turns: int, spent: float = 0.06) -> dict[str, float]:
    """Every job in every turn, as often as fits in so many seconds; the median over the turns."""
    once = {name: seconds(job, 1) for name, job in jobs.items()}
    once = {name: seconds(job, 1) for name, job in jobs.items()} if CUDA else once
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(turns):
        for name, job in jobs.items():
            times[name].append(seconds(job, max(1, min(50, round(spent / once[name])))))
    return {name: statistics.median(found) for name, found in times.items()}


def cleaned() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def cache_bytes(states: dict[int, tuple[Tensor, Tensor]]) -> int:
    return sum(z.numel() * z.element_size() for pair in states.values() for z in pair)


def longest(rival: Rival, model: Any, batch: int, per_token: float) -> int:
    """The longest context of which a step really runs, to a hundredth, found by halving."""
    cleaned()
    room = torch.cuda.get_device_properties(0).total_memory - torch.cuda.memory_allocated()
    low, high = 0, int(room / (batch * per_token))
    while high - low > max(16, high // 100):
        middle = high - (high - low) // 8 if low == 0 else (low + high) // 2  # most of what is free is used
        try:
            Step(rival, model, batch, middle, middle, {}).eager()
            torch.cuda.synchronize()
            low = middle
        except torch.OutOfMemoryError:
            high = middle
        cleaned()
    return low
