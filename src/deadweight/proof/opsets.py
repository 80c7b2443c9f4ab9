"""Operations grouped by the law they obey. An operation in no group has no rule, and blocks every proof."""

from __future__ import annotations

# They only move, repeat or select elements: they act on labels as on values.
SHAPE = {
    f"aten.{name}"
    for name in ["reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "flatten", "unflatten", "movedim", "index", "index_select", "gather", "repeat", "repeat_interleave", "roll", "flip", "narrow", "expand_as", "view_as", "reshape_as", "swapaxes", "numpy_T", "mT", "T", "tile", "unfold", "hsplit", "tensor_split", "diagonal", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "broadcast_to", "squeeze_copy", "alias_copy", "masked_select"]
} | {"getitem"}

# f(x + s) = f(x) + s has no reason to hold, and they act on each element alone.
POINTWISE = {
    f"aten.{name}"
    for name in ["gelu", "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "pow", "square", "abs", "sin", "cos", "erf", "softplus", "elu", "leaky_relu", "hardswish", "hardtanh", "hardsigmoid", "relu6", "mish", "log1p", "expm1", "reciprocal", "sign", "floor", "ceil", "round", "clamp", "clamp_min", "clamp_max", "logical_not", "isnan", "isinf", "isfinite", "atan", "atan2", "tan", "selu", "celu", "prelu", "logsigmoid", "log_sigmoid", "softsign", "threshold", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "rsub", "remainder", "fmod", "floor_divide", "__and__", "__or__", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "nan_to_num", "true_divide", "special_erf", "log2", "exp2", "hardshrink", "softshrink"]
}

# f(s·x) = s·f(x) for s > 0.
POSITIVELY_HOMOGENEOUS = {"aten.relu", "aten.leaky_relu", "aten.abs", "aten.prelu"}

CONVOLUTIONS = {"aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution"}

MINUS_INFINITY = -1e30  # a fill value below this makes a softmax weight exactly 0
