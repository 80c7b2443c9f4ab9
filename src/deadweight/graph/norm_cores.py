"""Norms without their parameters, one function each, in the precision of the input."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deadweight.graph.node import Graph, Target


def layer_core(x: Tensor, n_axes: int, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + ε) over the last axes."""
    axes = tuple(range(-n_axes, 0))
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def rms_core(x: Tensor, n_axes: int, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + ε) over the last axes."""
    axes = tuple(range(-n_axes, 0))
    return x * (x.square().mean(axes, keepdim=True) + eps).rsqrt()


def unit_core(x: Tensor, n_axes: int, scale: float, eps: float) -> Tensor:
    """scale · x / max(‖x‖, ε) over the last axes; the derivative of ‖x‖ at 0 is taken for 0."""
    length = torch.linalg.vector_norm(x, dim=tuple(range(-n_axes, 0)), keepdim=True)
    return x * (scale / length.clamp_min(eps))


def batch_core(x: Tensor, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + ε) over every axis but the channels' (axis 1)."""
    axes = tuple(a for a in range(x.ndim) if a != 1)
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def instance_core(x: Tensor, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + ε) over the spatial axes, for every sample and channel."""
    return layer_core(x, x.ndim - 2, eps)


def group_core(x: Tensor, groups: int, eps: float) -> Tensor:
    """(x − mean) / sqrt(var + ε) over each group of channels and all spatial axes."""
    return layer_core(x.reshape(x.shape[0], groups, -1), 1, eps).reshape(x.shape)


def without_epsilon(graph: Graph) -> Graph:
    """The same model with the ε of every norm set to 0."""
    nodes = {
        name: replace(node, args=(*node.args[:-1], 0.0)) if node.op in CORES else node
        for name, node in graph.nodes.items()
    }
    return replace(graph, nodes=nodes)


CORES: dict[str, Target] = {
    "core.layer": layer_core,
    "core.rms": rms_core,
    "core.unit": unit_core,
    "core.batch": batch_core,
    "core.instance": instance_core,
    "core.group": group_core,
}
