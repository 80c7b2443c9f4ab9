"""The operations that rewrites write: the name by which rules know each, and the function that computes it."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from deadweight.graph.node import Operation

aten = torch.ops.aten


def safe_softmax(x: Tensor, axis: int) -> Tensor:
    """A softmax whose lines of −∞ alone become zeros, not NaN."""
    hidden = (x == -math.inf).all(axis, keepdim=True)
    return torch.softmax(x.masked_fill(hidden, 0.0), axis).masked_fill(hidden, 0.0)


ADD = Operation("aten.add", aten.add.Tensor)
SUB = Operation("aten.sub", aten.sub.Tensor)
MUL = Operation("aten.mul", aten.mul.Tensor)
DIV = Operation("aten.div", aten.div.Tensor)
LINEAR = Operation("linear", aten.linear.default)
CONVOLUTION = Operation("aten.convolution", aten.convolution.default)
MATMUL = Operation("aten.matmul", aten.matmul.default)
SOFTMAX = Operation("softmax", aten.softmax.int)
SAFE_SOFTMAX = Operation("softmax", safe_softmax)
EMBEDDING = Operation("aten.embedding", aten.embedding.default)
VECTOR_NORM = Operation("aten.linalg_vector_norm", aten.linalg_vector_norm.default)
DROPOUT = Operation("aten.dropout", aten.dropout.default)
RELU = Operation("aten.relu", aten.relu.default)
LEAKY_RELU = Operation("aten.leaky_relu", aten.leaky_relu.default)
ZEROS = Operation("aten.zeros", aten.zeros.default)
FULL = Operation("aten.full", aten.full.default)

TRANSPOSE = Operation("aten.t", aten.t.default)
PERMUTE = Operation("aten.permute", aten.permute.default)
RESHAPE = Operation("aten.reshape", aten.reshape.default)
EXPAND = Operation("aten.expand", aten.expand.default)
SELECT = Operation("aten.select", aten.select.int)
SLICE = Operation("aten.slice", aten.slice.Tensor)
CAT = Operation("aten.cat", aten.cat.default)
STACK = Operation("aten.stack", aten.stack.default)
VIEW_AS_REAL = Operation("aten.view_as_real", aten.view_as_real.default)
GETITEM = Operation("getitem", operator.getitem)

# Operations that see the same elements otherwise.
VIEWS = {"aten.t", "aten.transpose", "aten.permute", "aten.reshape", "aten.slice", "aten.select"}
VIEWS |= {"aten.unsqueeze", "aten.squeeze", "aten.expand", "getitem", "aten.split", "aten.chunk", "aten.unbind"}
