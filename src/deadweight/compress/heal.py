"""Healing: distil from the original into the compressed model, first block by block, then as a whole.

Block by block, every block of the small model is trained to give the outputs of the original's block on the original's
inputs: errors of earlier blocks do not reach it, and no gradient passes from block to block. As a whole, the small
model is trained on the predictions of the original (KL divergence), on the same text.
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
from deadweight.compress.settings import RATE
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


@dataclass(frozen=True)
class Healing:
    """Number of steps and learning rate; `folder` holds the state until the end, so that healing can be resumed."""

    steps: int
    rate: float = RATE
    seed: int = 0  # of the order of batches
    folder: Path | None = None


def heal_or_undo(
    original: nn.Module,
    compressed: nn.Module,
    batches: Sequence[Batch],
    healing: Healing,
    progress: Progress = silent,
) -> tuple[str, ...]:
    """Heal on all batches but one; if the loss on that one rises, restore the weights and report it."""
    separate_weights(original, compressed)
    kept = {name: tensor.detach().clone() for name, tensor in compressed.state_dict().items()}
    before = judge(original, compressed, batches[-1:]).error
    distil(original, compressed, batches[:-1] or batches, healing, progress)
    after = judge(original, compressed, batches[-1:]).error
    if after <= before:
        return ()
    compressed.load_state_dict(kept)
    return (
        f"healing for {healing.steps} steps was undone: on a batch set aside the error rose from {before:.2e} to "
        f"{after:.2e}; it may take more steps, or more text",
    )


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
    trained = [p for path in blocks for p in compressed.get_submodule(path).parameters()]
    require_gradients(compressed, trained)
    held = [p != 0 for p in trained] if stock else []
    optimizer = make_optimizer(trained, healing.rate)
    steps, place = healing.steps, healing.folder
    first = 0 if place is None else load_state(place, compressed, optimizer)
    saved = time.monotonic()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = healing.rate * warm_cosine(step, steps, max(1, steps // 20), final_share=0.1)
        batch = batch_of(batches, step, healing.seed, accelerator)
        loss = one_step(original, compressed, blocks, batch, not stock and step < min(BLOCKWISE, steps / 4))
        if not math.isfinite(loss):
            raise DeadweightError(
                f"the loss of healing is {loss} at step {step}; expected a number: nothing is written"
            )
        average_gradients(trained, accelerator)
        for p, used in zip(trained, held, strict=False):
            if p.grad is not None:
                p.grad *= used
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress("healing", step + 1, steps)
        if place is not None and (step + 1) % SAVE_EVERY == 0 and time.monotonic() - saved > SAVE_AFTER:
            save_state(place, compressed, optimizer, step + 1, main=accelerator.is_main_process)
            saved = time.monotonic()
    if place is not None and accelerator.is_main_process:
        shutil.rmtree(place, ignore_errors=True)
    require_gradients(compressed, list(compressed.parameters()))


def require_gradients(model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
    """Ask autograd for gradients of these parameters of the model, and of no others."""
    model.requires_grad_(False)
    for p in trained:
        p.requires_grad_(True)


def make_optimizer(trained: Sequence[nn.Parameter], rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=trained[0].is_cuda)


def average_gradients(trained: Sequence[nn.Parameter], accelerator: Any) -> None:
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


def batch_of(batches: Sequence[Batch], step: int, seed: int, accelerator: Any) -> Batch:
    """The batch of a step and process; the order depends on the seed alone."""
    number = step * accelerator.num_processes + accelerator.process_index
    epoch, at = divmod(number, len(batches))
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed + epoch))
    return batches[int(order[at])]


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


def one_step(original: nn.Module, compressed: nn.Module, blocks: Sequence[str], batch: Batch, blockwise: bool) -> float:
    """Compute the gradients of one batch, and return its loss."""
    device = next(compressed.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        return by_blocks(original, compressed, blocks, batch) if blockwise else as_a_whole(original, compressed, batch)


def as_a_whole(original: nn.Module, compressed: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        goal, logits = main_output(run_model(original, batch))
    output, _ = main_output(run_model(compressed, batch))
    if logits:
        a, b = goal.float().log_softmax(-1), output.float().log_softmax(-1)
        loss = (a.exp() * (a - b)).sum(-1).mean()
    else:
        loss = relative(output, goal)
    loss.backward()
    return float(loss.detach())


def by_blocks(original: nn.Module, compressed: nn.Module, blocks: Sequence[str], batch: Batch) -> float:
    """Compare each block with the original's on the original's inputs, one at a time."""
    with torch.no_grad(), calls(original, blocks) as seen:
        run_model(original, batch)
    total = 0.0
    for path in blocks:
        args, kwargs, goal = seen[path]
        loss = relative(first_tensor(compressed.get_submodule(path)(*args, **kwargs)), goal)
        loss.backward()
        total += float(loss.detach())
    return total / len(blocks)


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
