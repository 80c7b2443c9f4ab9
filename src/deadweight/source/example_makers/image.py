"""Example images and videos, whole or as patches, and inputs that describe or prompt them."""

from __future__ import annotations

import torch

from deadweight.source.example_makers.need import Example, Need, first, setting
from deadweight.source.example_makers.text import N_FRAMES
from deadweight.source.type_aliases import Config

CHANNELS = ("num_channels", "in_channels", "in_chans")
SIZES = ("image_size", "img_size", "max_img_size", "input_size")
DEFAULT_SIZE = 224
PACKED = ("grid_thw", "image_grid_thw")  # say where the patches of all images together lie
BATCHED = ("spatial_shapes", "pixel_position_ids", "target_sizes")  # say it for each image


def image(need: Need) -> Example:
    height, width = image_size(need)
    return Example(torch.randn(1, n_channels(need), height, width))


def image_size(need: Need) -> tuple[int, int]:
    size = setting(vision(need), *SIZES, default=DEFAULT_SIZE)
    if isinstance(ratios := setting(vision(need), "scaled_images_ratios"), (list, tuple)):
        size = int(setting(vision(need), "patch_size", default=16) / min(ratios))
    if isinstance(size, dict):
        size = [size.get("height", DEFAULT_SIZE), size.get("width", DEFAULT_SIZE)]
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (first(size), first(size))
    stacked = 2 if "prompt_pixel_values" in need.names else 1  # the model puts the prompt above the image
    return int(height) // stacked, int(width)


def vision(need: Need) -> Config:
    return getattr(need.config, "vision_config", None) or need.config


def n_channels(need: Need) -> int:
    channels = first(setting(vision(need), *CHANNELS, default=3))
    return int(channels) if isinstance(channels, int) else 3


def default_image(need: Need) -> Example:
    """An image of a usual size, for a config whose size is too small for its own strides."""
    return Example(torch.randn(1, n_channels(need), DEFAULT_SIZE, DEFAULT_SIZE))


def video(need: Need) -> Example:
    frames = need.number("num_frames", "frames_per_clip", default=N_FRAMES)
    return Example(image(need).value[:, None].expand(-1, frames, -1, -1, -1).contiguous())


def one_image_of_a_list(need: Need) -> Example:
    """A batch of one, with a list of one image."""
    return Example(image(need).value[:, None])


def pair_of_images(need: Need) -> Example:
    return Example(torch.randn(1, 2, *image(need).value.shape[1:]))


def grid(need: Need) -> tuple[int, int]:
    """Rows and columns of patches: twice the number that is merged into one, at least four."""
    merge = first(setting(vision(need), "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))
    pooled = first(setting(vision(need), "pooling_kernel_size", default=1))
    side = max(4, 2 * int(merge), 2 * int(pooled))
    return side, side


def patch(need: Need) -> tuple[int, int, int]:
    """Channels, frames and side of one patch."""
    frames = first(setting(vision(need), "temporal_patch_size", "patch_temporal", default=1))
    return n_channels(need), int(frames), int(first(setting(vision(need), "patch_size", default=16)))


def patches(need: Need, described_by: tuple[str, ...]) -> torch.Tensor | None:
    """Patches, one row each; only together with an input that gives their positions."""
    if not set(described_by) & set(need.names):
        return None
    (rows, columns), (channels, frames, side) = grid(need), patch(need)
    return torch.randn(rows * columns, channels * frames * side * side)


def flat_patches(need: Need) -> Example | None:
    rows = patches(need, PACKED)
    return Example(rows) if rows is not None else None


def square_patches(need: Need) -> Example | None:
    rows, (channels, frames, side) = patches(need, PACKED), patch(need)
    return Example(rows.view(-1, channels * frames, side, side)) if rows is not None else None


def batched_patches(need: Need) -> Example | None:
    rows = patches(need, BATCHED)
    return Example(rows[None]) if rows is not None else None


def strip_of_patches(need: Need) -> Example | None:
    """One row of patches side by side, as an image."""
    rows, (channels, _, side) = patches(need, BATCHED), patch(need)
    return Example(torch.randn(1, channels, side, len(rows) * side)) if rows is not None else None


def grid_thw(need: Need) -> Example:
    return Example(torch.tensor([[1, *grid(need)]]))


def grid_hw(need: Need) -> Example:
    return Example(torch.tensor([grid(need)]))


def patch_positions(need: Need) -> Example:
    rows, columns = grid(need)
    return Example(torch.cartesian_prod(torch.arange(columns), torch.arange(rows))[None])


def patch_mask(need: Need) -> Example:
    rows, columns = grid(need)
    return Example(torch.ones(1, rows * columns, dtype=torch.long))


def merge_sizes(need: Need) -> Example:
    return Example(torch.tensor([2]))


def image_of_each_token(need: Need) -> Example:
    """Which images each token may attend to: the only one."""
    return Example(torch.ones(1, need.length, 1, dtype=torch.long))


def latent_positions(need: Need) -> Example:
    """Which tokens are placeholders for the image: the first ones, as many as the model makes of an image."""
    mask = torch.zeros(1, need.length, dtype=torch.bool)
    mask[:, 1 : 1 + need.number("latent_query_num", default=1)] = True
    return Example(mask)
