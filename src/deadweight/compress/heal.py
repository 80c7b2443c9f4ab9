"""Healing: distil from the original into the compressed model, as a whole, smaller heads first block by block.

As a whole, the compressed model is trained on the predictions of the original (KL divergence). Block by block, every
block of it is trained to give the outputs of the original's block on the original's inputs: errors of earlier blocks do
not reach it, and no gradient passes from block to block.

What remains to be gained after coding a cache is small beside the noise of a gradient: a step reads many tokens, and
weights in half precision have copies in float32, because steps below their rounding would be lost.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.compress.calibration import Batch
from deadweight.compress.judge import judge, main_output, run_model
from deadweight.compress.settings import HEAD_RATE
from deadweight.compress.streaming import gather_weights
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.slim.coder import Coder
from deadweight.slim.heads import HeadPacking
from deadweight.source.private_api import own_parameters
from deadweight.train.launch import make_accelerator
from deadweight.train.schedule import warm_cosine
from deadweight.train.state import load_state, save_state

SAVE_EVERY, SAVE_AFTER = 100, 60.0  # steps and seconds between two saved states
BLOCKWISE = 200  # steps, at most; of few, a quarter
AT_A_TIME = 2048  # tokens whose distributions are compared at a time
OFTEN = 4  # a text that is read more often than this is too short


@dataclass(frozen=True)
class Healing:
    """How to heal; `folder` holds the state until the end, so that healing can be resumed."""

    steps: int
    rate: float = HEAD_RATE
    tokens: int = 0  # of a step, over all processes; 0: one batch for each process
    blockwise: int = BLOCKWISE  # steps block by block, at most
    seed: int = 0  # of the order of batches
    folder: Path | None = None


@dataclass(frozen=True)
class Healed:
    """The steps that were kept, and notes for the report."""

    steps: int
    notes: tuple[str, ...] = ()


def heal_or_undo(
    original: nn.Module,
    compressed: nn.Module,
    batches: Sequence[Batch],
    healing: Healing,
    progress: Progress = silent,
) -> Healed:
    """Heal on all batches but one; if the loss on that one rises, restore the weights and report it."""
    separate_weights(original, compressed)
    kept = {name: tensor.detach().clone() for name, tensor in compressed.state_dict().items()}
    trained, aside = batches[:-1] or batches, batches[-1:]
    before = judge(original, compressed, aside).error
    distil(original, compressed, trained, healing, progress)
    after = judge(original, compressed, aside).error
    notes = notes_on_text(trained, healing)
    if after <= before:
        return Healed(healing.steps, notes)
    compressed.load_state_dict(kept)
    undone = (
        f"healing for {healing.steps} steps was undone: on a batch set aside the error rose from {before:.2e} to "
        f"{after:.2e}; it may take more text, more steps, or a lower rate"
    )
    return Healed(0, (undone, *notes))


def notes_on_text(batches: Sequence[Batch], healing: Healing) -> tuple[str, ...]:
    """A warning where the text is so short that it was read many times."""
    accelerator = make_accelerator()
    read = healing.steps * batches_per_step(batches, healing, accelerator) * accelerator.num_processes
    times = read / len(batches)
    if times <= OFTEN or "input_ids" not in batches[0]:
        return ()
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    return (f"healing read a text of {tokens:,} tokens {times:.0f} times: more text heals better (--heal-text)",)


def healing_folder(target: Path, original: nn.Module, batches: Sequence[Batch], settings: Any) -> Path:
    """The folder of the state of healing: beside OUT, named by a hash of weights, text and settings."""
    tensors = [*original.state_dict().values(), *(x for batch in batches for x in batch.values())]
    sums = [(x.shape, checksum(x)) for x in tensors if isinstance(x, Tensor)]
    key = hashlib.sha256(repr((sums, settings)).encode()).hexdigest()[:12]
    return target.with_name(f".{target.name}.healing-{key}")


def checksum(tensor: Tensor) -> int:
    """The sum of the elements' bits as integers: the same in whatever order they are added."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(integers).sum(dtype=torch.int64))


def distil(
    original: nn.Module,
    compressed: nn.Module,
    batches: Sequence[Batch],
    healing: Healing,
    progress: Progress = silent,
) -> None:
    """Train the compressed model in place to match the outputs of the original.

    A stock model is trained as a whole, because its blocks may have heads of another size. Its zeros stay zero.
    """
    separate_weights(original, compressed)
    accelerator = make_accelerator()
    stock = not any(isinstance(part, (HeadPacking, Coder)) for part in compressed.modules())
    blocks = longest_module_list(compressed) if stock else blocks_of(compressed)
    found = {id(p): p for path in blocks for p in compressed.get_submodule(path).parameters()}
    trained = Masters(list(found.values()))
    require_gradients(compressed, trained.used)
    held = [p != 0 for p in trained.used] if stock else []
    optimizer = make_optimizer(trained.weights, healing.rate)
    steps, place = healing.steps, healing.folder
    first = 0 if place is None else load_state(place, trained.weights, optimizer)
    trained.publish()
    parts = batches_per_step(batches, healing, accelerator)
    saved = time.monotonic()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = healing.rate * warm_cosine(step, steps, max(1, steps // 20), final_share=0.02)
        blockwise = not stock and step < min(healing.blockwise, steps / 4)
        for part in range(parts):
            batch = batch_of(batches, step * parts + part, healing.seed, accelerator)
            loss = one_step(original, compressed, blocks, batch, blockwise, share=1 / parts)
            if not math.isfinite(loss):
                raise DeadweightError(
                    f"the loss of healing is {loss} at step {step}; expected a number: nothing is written"
                )
            trained.collect()
        average_gradients(trained.weights, accelerator)
        for p, used in zip(trained.weights, held, strict=False):
            if p.grad is not None:
                p.grad *= used
        torch.nn.utils.clip_grad_norm_(trained.weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained.publish()
        progress("healing", step + 1, steps)
        if place is not None and (step + 1) % SAVE_EVERY == 0 and time.monotonic() - saved > SAVE_AFTER:
            save_state(place, trained.weights, optimizer, step + 1, main=accelerator.is_main_process)
            saved = time.monotonic()
    if place is not None and accelerator.is_main_process:
        shutil.rmtree(place, ignore_errors=True)
    require_gradients(compressed, list(compressed.parameters()))


class Masters:
    """The weights that are trained, and for those in half precision copies in float32, which the optimizer changes.

    The model computes in its own precision; gradients of several batches are added in that of the copies.
    """

    def __init__(self, used: Sequence[nn.Parameter]) -> None:
        self.used = used
        self.weights = nn.ParameterList(nn.Parameter(p.detach().float()) if is_half(p) else p for p in used)

    def collect(self) -> None:
        """Add the gradients of the model's weights to those of their copies."""
        for p, master in zip(self.used, self.weights, strict=True):
            if master is p or p.grad is None:
                continue
            fresh = p.grad.float()
            master.grad = fresh if master.grad is None else master.grad.add_(fresh)
            p.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies to the model's weights."""
        for p, master in zip(self.used, self.weights, strict=True):
            if master is not p:
                p.copy_(master)


def is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def batches_per_step(batches: Sequence[Batch], healing: Healing, accelerator: Any) -> int:
    """The batches that each process reads in one step."""
    ids = batches[0].get("input_ids")
    if not healing.tokens or ids is None:
        return 1
    return max(1, round(healing.tokens / (ids.numel() * accelerator.num_processes)))


def require_gradients(model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
    """Ask autograd for gradients of these parameters of the model, and of no others."""
    model.requires_grad_(False)
    for p in trained:
        p.requires_grad_(True)


def make_optimizer(trained: nn.ParameterList, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(trained), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=trained[0].is_cuda)


def average_gradients(trained: nn.ParameterList, accelerator: Any) -> None:
    """Replace gradients by their mean over all processes."""
    for p in trained:
        if p.grad is not None and accelerator.num_processes > 1:
            p.grad = accelerator.reduce(p.grad, "mean")


def separate_weights(original: nn.Module, compressed: nn.Module) -> None:
    """Load all weights of both models, and copy those that they share: only the compressed model may change."""
    known = {p.data_ptr() for p in original.parameters()}
    shared = {id(p) for p in compressed.parameters() if p.data_ptr() in known}
    fresh: dict[int, nn.Parameter] = {}
    for part in compressed.modules():
        for name, p in own_parameters(part).items():
            if p is not None and id(p) in shared:
                own_parameters(part)[name] = fresh.setdefault(id(p), nn.Parameter(p.detach().clone(), p.requires_grad))
    gather_weights(original)
    gather_weights(compressed)


def batch_of(batches: Sequence[Batch], at: int, seed: int, accelerator: Any) -> Batch:
    """The batch of a process at one place of its order, which depends on the seed alone."""
    number = at * accelerator.num_processes + accelerator.process_index
    epoch, place = divmod(number, len(batches))
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed + epoch))
    return batches[int(order[place])]


def blocks_of(model: nn.Module) -> list[str]:
    """The repeated blocks that hold an attention, in their order."""
    blocks: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, (HeadPacking, Coder)):
            block = re.match(r"(.*\.\d+)(?=\.)", path)
            blocks[block[1] if block else path.rpartition(".")[0]] = None
    return list(blocks)


def longest_module_list(model: nn.Module) -> list[str]:
    """The members of the model's longest list of modules."""
    lists = {path: len(part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    if not lists:
        raise DeadweightError("found no list of blocks to heal; expected one (or leave out --heal)")
    longest = max(lists, key=lambda path: lists[path])
    return [f"{longest}.{i}" for i in range(lists[longest])]


def one_step(
    original: nn.Module,
    compressed: nn.Module,
    blocks: Sequence[str],
    batch: Batch,
    blockwise: bool,
    *,
    share: float = 1.0,
) -> float:
    """Add this share of the gradients of one batch, and return its loss."""
    device = next(compressed.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        if blockwise:
            return by_blocks(original, compressed, blocks, batch, share)
        return as_a_whole(original, compressed, batch, share)


def as_a_whole(original: nn.Module, compressed: nn.Module, batch: Batch, share: float) -> float:
    with torch.no_grad():
        goal, logits = main_output(run_model(original, batch))
    output, _ = main_output(run_model(compressed, batch))
    loss = Divergence.apply(goal, output) if logits else relative(output, goal)
    (loss * share).backward()
    return float(loss.detach())


def by_blocks(original: nn.Module, compressed: nn.Module, blocks: Sequence[str], batch: Batch, share: float) -> float:
    """Compare each block with the original's on the original's inputs, one at a time."""
    with torch.no_grad(), calls(original, blocks) as seen:
        run_model(original, batch)
    total = 0.0
    for path in blocks:
        args, kwargs, goal = seen[path]
        loss = relative(first_tensor(compressed.get_submodule(path)(*args, **kwargs)), goal)
        (loss * share).backward()
        total += float(loss.detach())
    return total / len(blocks)


class Divergence(torch.autograd.Function):
    """The mean KL divergence of two tensors of logits, from the first to the second, with its gradient for the second.

    Distributions over the whole vocabulary are large: in float32 there are only those of some tokens at a time.
    """

    @staticmethod
    def forward(ctx: Any, goal: Tensor, output: Tensor) -> Tensor:
        a, b = goal.flatten(0, -2), output.flatten(0, -2)
        gradient = torch.empty_like(b)
        total = torch.zeros((), dtype=at_least_float32(b), device=b.device)
        for start in range(0, len(b), AT_A_TIME):
            at = slice(start, start + AT_A_TIME)
            wanted, found = (x[at].to(at_least_float32(x)).log_softmax(-1) for x in (a, b))
            total += (wanted.exp() * (wanted - found)).sum()
            gradient[at] = (found.exp() - wanted.exp()) / len(b)
        ctx.save_for_backward(gradient.view_as(output))
        return total / len(b)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[None, Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * given[0]


def at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def relative(output: Tensor, goal: Tensor) -> Tensor:
    return (output.float() - goal.float()).pow(2).mean() / goal.float().pow(2).mean().clamp(min=1e-12)


def first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def calls(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The arguments and the output of every block in one forward pass."""
    seen: dict[str, Any] = {}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen[path] = (args, kwargs, first_tensor(output))

        return hook

    hooks = [model.get_submodule(p).register_forward_hook(watch(p), with_kwargs=True) for p in paths]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
