"""Whether a model can be trained in the memory there is: checked before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from deadweight.errors import DeadweightError
from deadweight.train.objective import language_model
from deadweight.train.settings import Run
from deadweight.transformer import TransformerConfig

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]

PER_PARAMETER = 16  # bytes: the weight, its gradient and the two moments of AdamW, in float32
PER_ACTIVATION = 2  # bytes, at least


def check_memory(run: Run, accelerator: Accelerator) -> None:
    """An error if weights, gradients, moments and the inputs of all layers alone need more than this machine has."""
    shape, parameters = run.shape(), count_parameters(run)
    tokens = run.train.batch // accelerator.num_processes * shape.context
    needed = PER_PARAMETER * parameters + PER_ACTIVATION * tokens * shape.d_model * shape.n_layers
    present = memory_of(accelerator)
    if needed > present:
        raise DeadweightError(
            f"found a model of {parameters:,} parameters and batches of {tokens:,} tokens, whose training needs at "
            f"least {needed / 1e9:,.0f} GB; expected less than {present / 1e9:,.1f} GB: choose a smaller width, "
            "context, batch or vocabulary, or fewer layers"
        )


def count_parameters(run: Run) -> int:
    """The parameters of the model, for the smallest vocabulary that its tokenizer can have."""
    try:
        with torch.device("meta"):
            config = TransformerConfig(**{**run.model, "vocab_size": run.shape().vocab_size})
            return language_model(config).num_parameters()
    except RuntimeError as error:  # torch cannot even count them
        raise DeadweightError("found a weight of more than 2⁶³ bytes; expected a smaller width") from error


def memory_of(accelerator: Accelerator) -> int:
    """Bytes of the device that holds the weights; shards may use the memory of all devices together."""
    if accelerator.device.type != "cuda":
        return psutil.virtual_memory().total
    shards = accelerator.num_processes if accelerator.distributed_type == "FSDP" else 1
    return torch.cuda.get_device_properties(accelerator.device).total_memory * shards
