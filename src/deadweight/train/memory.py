"""Whether a model can be trained in the memory there is: checked before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from deadweight.errors import DeadweightError
from deadweight.train.settings import Run
from deadweight.transformer import TransformerForCausalLM

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]

BYTES = 16  # per parameter: the weight, its gradient and the two moments of AdamW, in float32


def check_memory(run: Run, accelerator: Accelerator) -> None:
    """An error if weights, gradients and moments alone need more than this machine has."""
    needed, present = BYTES * count_parameters(run), memory_of(accelerator)
    if needed > present:
        raise DeadweightError(
            f"found a model of {needed // BYTES:,} parameters, whose training needs at least {needed / 1e9:,.0f} GB; "
            f"expected one that fits into {present / 1e9:,.1f} GB: choose a smaller width, context or vocabulary, or "
            "fewer layers"
        )


def count_parameters(run: Run) -> int:
    """The parameters of the model, for the smallest vocabulary that its tokenizer can have."""
    try:
        with torch.device("meta"):
            return TransformerForCausalLM(run.config(run.shape().vocab_size)).num_parameters()
    except RuntimeError as error:  # torch cannot even count them
        raise DeadweightError("found a weight of more than 2⁶³ bytes; expected a smaller width") from error


def memory_of(accelerator: Accelerator) -> int:
    """Bytes of the device that holds the weights; shards may use the memory of all devices together."""
    if accelerator.device.type != "cuda":
        return psutil.virtual_memory().total
    shards = accelerator.num_processes if accelerator.distributed_type == "FSDP" else 1
    return torch.cuda.get_device_properties(accelerator.device).total_memory * shards
