"""Example sound: waves, spectrograms with bands or frames first, latents of codecs."""

from __future__ import annotations

import torch

from deadweight.source.example_makers.need import Example, Need, first
from deadweight.source.example_makers.text import WIDTHS

N_SAMPLES = 3200
BANDS = (
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "num_mel_bins",
    "input_dim",
    "input_feat_size",
    "feature_size",
)


def wave(need: Need) -> Example | None:
    """The number of samples from which the model's convolutions make `length` frames."""
    kernels, strides = need.get("conv_kernel"), need.get("conv_stride")
    if not isinstance(kernels, (list, tuple)) or not isinstance(strides, (list, tuple)):
        return None
    n_samples = need.length
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        n_samples = (n_samples - 1) * stride + kernel
    return Example(torch.randn(1, n_samples))


def wave_by_channel(need: Need) -> Example:
    return Example(torch.randn(1, need.number("audio_channels", default=1), N_SAMPLES))


def bare_wave(need: Need) -> Example:
    return Example(torch.randn(1, N_SAMPLES))


def bands_first(need: Need) -> Example:
    n_frames = 2 * need.number("max_source_positions", default=16 * need.length)
    return Example(torch.randn(1, n_bands(need), n_frames))


def frames_first(need: Need) -> Example:
    n_frames = need.number("max_length", default=0) if hasattr(need.config, "frequency_stride") else 0
    return Example(torch.randn(1, n_frames or 16 * need.length, n_bands(need)))


def frames_of_tokens(need: Need) -> Example | None:
    """Eight frames for each token, for models that add the two."""
    return Example(torch.randn(1, n_bands(need), 8 * need.length)) if "input_ids" in need.names else None


def window_of_frames(need: Need) -> Example | None:
    """As many frames as the model processes together."""
    window = need.get("n_window")
    return Example(torch.randn(1, n_bands(need), 2 * window)) if isinstance(window, int) else None


def mask_of_window(need: Need) -> Example | None:
    window = need.get("n_window")
    return Example(torch.ones(1, 2 * window, dtype=torch.long)) if isinstance(window, int) else None


def many_bands(need: Need) -> Example | None:
    """Frames of 128 bands, where the config does not say how many."""
    return Example(torch.randn(1, 16 * need.length, 128)) if need.get(*BANDS) is None else None


def stacked_frames(need: Need) -> Example:
    """Several frames of bands in one: as many as the config stacks, or a frame with its neighbour and differences."""
    n_stacked = need.number("num_stacked_frames", default=4)
    return Example(torch.randn(1, 16 * need.length, n_stacked * n_bands(need)))


def framed_image(need: Need) -> Example | None:
    """A spectrogram as an image of one channel."""
    if not isinstance(need.get("spec_size"), int):
        return None
    n_frames = need.number("spec_size", default=64) * (need.number("spec_size", default=64) // n_bands(need) or 1)
    return Example(torch.randn(1, 1, n_frames, n_bands(need)))


def n_bands(need: Need) -> int:
    return need.number(*BANDS, default=80)


def frame_mask(need: Need) -> Example:
    """Which frames are not padding: all frames of the features."""
    features = frames_first(need).value.shape[1] if "audio_mel" in need.names else bands_first(need).value.shape[2]
    return Example(torch.ones(1, features, dtype=torch.long))


def frame_mask_of_frames_first(need: Need) -> Example:
    return Example(torch.ones(1, frames_first(need).value.shape[1], dtype=torch.long))


def nothing_masked(need: Need) -> Example:
    return Example(torch.zeros(1, frames_first(need).value.shape[1], dtype=torch.bool))


def latents(need: Need) -> Example:
    """The input of a codec's decoder: one vector per frame, with the vector axis first."""
    return Example(torch.randn(1, int(first(need.get(*WIDTHS, default=8))), need.length))
