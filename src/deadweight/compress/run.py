"""Compressing a model: its cache by codes, or its heads by dropping dimensions."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from deadweight.compress.cache_result import CacheCompression
from deadweight.compress.code_cache import compress_cache
from deadweight.compress.job import CompressionJob
from deadweight.compress.result import Compression
from deadweight.compress.settings import Settings
from deadweight.compress.smaller_heads import compress_heads, n_parameters
from deadweight.compress.streaming import device_of, float_of, gather_weights, stream
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.save.atomic_folder import check_out, resolve_path
from deadweight.slim.format import SlimSpec
from deadweight.slim.load import is_slim, slim_class
from deadweight.source.model import Source, open_complete
from deadweight.source.plain_text import check_text, read_text
from deadweight.source.printable import printable, reason
from deadweight.threads import threads_for


@torch.inference_mode(False)
@torch.enable_grad()  # gradients are needed even if the caller has disabled them
def compress(
    model: Any, out: str | Path | None = None, *, progress: Progress = silent, **options: Any
) -> Compression | CacheCompression:
    """Make the cache of a model, or its attention weights, smaller at a measured loss; `Settings` lists the options.

    Without OUT the result's `module` is the compressed model, in the precision that it was computed in; with OUT there
    is none: load the folder. Memory holds one block of the model in float32, the activations between blocks, and
    the measurements of the heads; healing needs the whole model twice.
    """
    try:
        settings = Settings(**options)
    except TypeError as error:
        raise DeadweightError(f"found an option that compress does not have ({reason(error)})") from error
    target = None if out is None else resolve_path(out)
    if target is not None:
        check_out(target, model, overwrite=settings.overwrite)
    for text in (settings.heal_text, settings.judge_text):
        if text is not None:
            check_text(read_text(text), text)
    source, precision = open_streamed(model, settings.device, settings.trust_remote_code)
    with threads_for(n_parameters(source.module)):
        job = CompressionJob(source, model, target, settings, precision, progress)
        if not settings.wants_heads and (settings.wants_cache or hasattr(source.module, "generate")):
            cache = compress_cache(job)
            return replace(cache, module=hand_over(cache.module, SlimSpec(caches=cache.caches), target))
        heads = compress_heads(job)
        return replace(heads, module=hand_over(heads.module, heads.slim, target))


def hand_over(module: nn.Module | None, slim: SlimSpec | None, target: Path | None) -> nn.Module | None:
    """The model for the caller, as a plain nn.Module; None if it was written to a folder."""
    return None if module is None or target is not None else as_slim_class(gather_weights(module), slim)


def as_slim_class(module: nn.Module, slim: SlimSpec | None) -> nn.Module:
    """Give a slim model in memory the class and config that it would have after loading, for save_pretrained.

    A stock model needs none of our code.
    """
    if slim is None:
        cast(Any, module).set_attn_implementation("eager")
    else:
        config: Any = copy.copy(module.config)
        config.deadweight = slim.to_json()
        for part in module.modules():
            if part.__dict__.get("config") is module.config and part is not module:
                part.config = config
        module.config, module.__class__ = config, slim_class(type(module))
    return module


def open_streamed(model: Any, device: str | None, trust_remote_code: bool = False) -> tuple[Source, torch.dtype]:
    """Open a model that computes in float32, block by block, on its device; and its stored precision."""
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model  # the caller's model does not change
    source = open_complete(own, trust_remote_code=trust_remote_code)
    if source.config is None:
        raise DeadweightError(
            f"{printable(source.name)} is no model of transformers; expected one: attention is observed through it"
        )
    if is_slim(source.config):
        raise DeadweightError(
            f"{printable(source.name)} is slim already; expected an original or a stock checkpoint: compress that one"
        )
    precision = float_of(source.module)
    mine = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one of several processes has a device of its own
    where = device or (mine if torch.cuda.is_available() else "cpu")
    stream(source.module.eval(), torch.device(where), compute_precision(precision))
    if not runs(source):  # it reads weights of parts that it does not call
        gather_weights(source.module)
    return source, precision


@torch.no_grad()
def runs(source: Source) -> bool:
    """Whether a streamed model runs on its example. A model that does not run at all is reported later."""
    args, kwargs = source.inputs.on(device_of(source.module), float_of(source.module))
    try:
        source.module(*args, **kwargs)
    except RuntimeError:
        return False
    except Exception:  # noqa: BLE001 - the model's own code
        return True
    return True


def compute_precision(precision: torch.dtype) -> torch.dtype:
    """The precision to compute in: float32 for weights in half precision."""
    return torch.float32 if precision in (torch.float16, torch.bfloat16) else precision
