"""Operations grouped by the law they obey. An operation in no group has no rule, and blocks every proof."""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


# They pick elements by the values of an index or a mask.
INDEXED = names("gather index index_select masked_select take_along_dim")

# Their second operand lends its shape alone.
SHAPE_OF_ANOTHER = names("expand_as reshape_as view_as")

# They only move, repeat or select elements: they act on labels as on values.
SHAPE = (
    names("""
T alias_copy broadcast_to cat channel_shuffle chunk diagonal expand flatten flip hsplit mT movedim narrow
numpy_T permute pixel_shuffle pixel_unshuffle repeat repeat_interleave reshape roll select slice split
split_with_sizes squeeze squeeze_copy stack swapaxes t tensor_split tile transpose unbind unflatten unfold
unsqueeze
""")
    | INDEXED
    | SHAPE_OF_ANOTHER
    | {"getitem"}
)

# They hand out the same memory, seen otherwise: repeated labels stay repeated, however large the value is.
FREE = names("t transpose permute unsqueeze squeeze expand slice select split chunk unbind narrow mT") | {"getitem"}

# Their rules keep repeated labels repeated, and refuse what is too large themselves.
KEEPS_REPEATED = names("add sub mul div neg matmul masked_fill where reshape log_softmax _log_softmax")
KEEPS_REPEATED |= {"linear", "softmax", "core.layer", "core.rms", "core.unit", "core.batch", "core.instance", "output"}

# f(x + s) = f(x) + s has no reason to hold, and they act on each element alone.
POINTWISE = names("""
__and__ __or__ abs atan atan2 bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max clamp_min
cos elu eq erf exp exp2 expm1 floor floor_divide fmod ge gelu gt hardshrink hardsigmoid hardswish
hardtanh isfinite isinf isnan le leaky_relu log log1p log2 log_sigmoid logical_and logical_not
logical_or logsigmoid lt maximum minimum mish nan_to_num ne pow prelu reciprocal relu relu6 remainder
round rsqrt rsub selu sigmoid sign silu sin softplus softshrink softsign special_erf sqrt square tan
tanh threshold true_divide
""")

# Of these, those that compare two numbers: what both sides carry makes no difference.
COMPARISONS = names("eq ge gt le lt ne")

# They run over time: each step reads the state before it through a weight, behind tanh, sigmoid or ReLU.
RECURRENT = {"recurrent.lstm", "recurrent.gru", "recurrent.rnn_tanh", "recurrent.rnn_relu"}

# f(s·x) = s·f(x) for s > 0. The activations have one tensor as their operand; PReLU has two.
HOMOGENEOUS_ACTIVATIONS = names("abs leaky_relu relu")
POSITIVELY_HOMOGENEOUS = HOMOGENEOUS_ACTIVATIONS | {"aten.prelu", "recurrent.rnn_relu"}

# They weigh the places of a channel alike in every channel, and mix no channels.
AVERAGES_OF_PLACES = names("""
_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d cumsum reflection_pad1d
reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""")

# f(s·x) = s·f(x) for s > 0, of all places of a channel.
HOMOGENEOUS_OVER_PLACES = names("""
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin cummax cummin kthvalue linalg_vector_norm max
max_pool1d max_pool2d max_pool3d median min sort std topk
""")

# Functions of the differences between two values, row by row or of every row with every other.
DISTANCES = names("_cdist_forward cdist pairwise_distance")

CONVOLUTIONS = {"aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution"}

# They ignore what is constant along their axis.
SOFTMAXES = {"softmax", "aten.log_softmax", "aten._log_softmax"}

MINUS_INFINITY = -1e30  # a fill value below this makes a softmax weight exactly 0
LOW_FILL = -1e4  # one below this does so in floating point: e^−10000 is far below the smallest number
