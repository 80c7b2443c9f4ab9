"""Buffers that all layers reuse: on a CPU, allocating a megabyte takes longer than filling it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

LARGEST = 1 << 23  # numbers that are kept for the next call; larger tensors are allocated each time


class Scratch(threading.local):
    """Tensors by name, per thread. A tensor is valid until the same name is taken again."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor on the device of another one; newly allocated wherever autograd may keep it."""
        size = math.prod(shape)
        fresh = like.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if fresh or size > LARGEST:
            return torch.empty(shape, dtype=dtype, device=like.device)
        held = self.known.get(name)
        if held is None or held.dtype != dtype or held.numel() < size:
            with torch.inference_mode(False):  # else it could be written to in that mode alone
                held = self.known[name] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


SCRATCH = Scratch()
