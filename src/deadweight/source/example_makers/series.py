"""Example time series, and the trajectories of reinforcement learning."""

from __future__ import annotations

import torch

from deadweight.source.example_makers.need import Example, Need
from deadweight.source.inputs import Span


def past_length(need: Need) -> int:
    """The context, and as many steps before it as the largest lag."""
    lags = need.get("lags_sequence", default=(0,))
    return need.number("context_length", default=16) + max(lags)


def past_values(need: Need) -> Example:
    n_channels = need.number("num_input_channels", "input_size", default=1)
    shape = (1, past_length(need), n_channels)
    several = n_channels > 1 or need.get("num_input_channels") is not None
    return Example(torch.randn(shape if several else shape[:2]))


def past_patches(need: Need) -> Example | None:
    """A series without channels, of a few whole patches."""
    patch = need.get("patch_length")
    return Example(torch.randn(1, 4 * patch)) if isinstance(patch, int) else None


def n_time_features(need: Need) -> int:
    return need.number("num_time_features", default=0) + need.number("num_dynamic_real_features", default=0)


def past_times(need: Need) -> Example:
    return Example(torch.randn(1, past_length(need), n_time_features(need)))


def future_times(need: Need) -> Example:
    return Example(torch.randn(1, need.number("prediction_length", default=1), n_time_features(need)))


def future_values(need: Need) -> Example:
    n_channels, n_steps = need.number("input_size", default=1), need.number("prediction_length", default=1)
    return Example(torch.randn((1, n_steps, n_channels) if n_channels > 1 else (1, n_steps)))


def all_observed(need: Need) -> Example:
    return Example(torch.ones(past_values(need).value.shape, dtype=torch.bool))


def no_padding(need: Need) -> Example:
    values = past_patches(need) or past_values(need)
    return Example(torch.zeros(values.value.shape, dtype=torch.long))


def frequency(need: Need) -> Example:
    return Example(torch.zeros(1, 1, dtype=torch.long), Span(0, need.number("freq_size", default=1) - 1))


def states(need: Need) -> Example:
    return Example(torch.randn(1, need.length, need.number("state_dim", default=4)))


def actions(need: Need) -> Example:
    return Example(torch.randn(1, need.length, need.number("act_dim", default=2)))


def one_number_each(need: Need) -> Example:
    return Example(torch.randn(1, need.length, 1))


def steps(need: Need) -> Example:
    return Example(torch.arange(need.length)[None])
