"""Example inputs of a Hugging Face model, from its config and the signature of its forward: one row per input name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.silence import silenced
from deadweight.source.inputs import Inputs, Span
from deadweight.source.text import reason

LENGTH = 5
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
NESTED = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "thinker_config", "llm_config")
PLACEHOLDERS = ("image", "video", "audio", "vision", "speech", "boi", "eoi", "boa", "eoa", "img")
FLAGS = {"use_cache": False}  # passed where the forward names them


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the config, or a config nested in it, holds."""
    for holder in (config, *(getattr(config, key, None) for key in NESTED)):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return default


def first(value: Any) -> Any:
    """A number from a number or from the first of a list of them."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def special_ids(config: Any) -> dict[str, tuple[int, ...]]:
    """Every token id that the config gives a meaning, by its name."""
    found: dict[str, tuple[int, ...]] = {}
    for holder in (config, *(getattr(config, key, None) for key in NESTED)):
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            if "token_id" in name or "token_index" in name:
                ids = value if isinstance(value, (list, tuple)) else (value,)
                found[name] = found.get(name, ()) + tuple(i for i in ids if isinstance(i, int))
    return found


@dataclass(frozen=True)
class Example:
    """One example tensor and the integers that may be drawn in its place (None: it stays as it is)."""

    value: torch.Tensor
    span: Span | None = None


def _tokens(config: Any, length: int) -> Example:
    n_vocab = int(first(setting(config, "vocab_size", "n_vocab", default=32)))
    meanings = special_ids(config)
    special = {i for ids in meanings.values() for i in ids}
    plain = [i for i in range(min(n_vocab, 4 * length + len(special) + 8)) if i not in special] or list(range(n_vocab))
    placeholders = {i for name, ids in meanings.items() if name.startswith(PLACEHOLDERS) for i in ids}
    avoid = tuple(sorted(i for i in placeholders if 0 <= i < n_vocab))
    ids = [plain[(3 * i + 1) % len(plain)] for i in range(length)]
    return Example(torch.tensor([ids]), Span(0, n_vocab - 1, avoid))


def _token_types(config: Any, length: int) -> Example:
    n_types = int(setting(config, "type_vocab_size", default=1))
    types = sorted(i * n_types // length for i in range(length))
    return Example(torch.tensor([types]), Span(0, n_types - 1))


def _mask(config: Any, length: int) -> Example:
    return Example(torch.ones(1, length, dtype=torch.long))


def _boxes(config: Any, length: int) -> Example:
    return Example(torch.tensor([[[1, 1, 2, 2]]]).expand(1, length, 4).contiguous())


def _image(config: Any, length: int) -> Example:
    vision = getattr(config, "vision_config", None) or config
    size = setting(vision, "image_size", "img_size", default=224)
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (first(size), first(size))
    channels = first(setting(vision, "num_channels", "in_channels", "in_chans", default=3))
    return Example(torch.randn(1, int(channels), int(height), int(width)))


def _video(config: Any, length: int) -> Example:
    image = _image(config, length).value
    frames = int(first(setting(config, "num_frames", "frames_per_clip", default=2)))
    return Example(image[:, None].expand(-1, frames, -1, -1, -1).contiguous())


def _wave(config: Any, length: int) -> Example:
    kernels, strides = setting(config, "conv_kernel"), setting(config, "conv_stride")
    if not isinstance(kernels, (list, tuple)) or not isinstance(strides, (list, tuple)):
        return Example(torch.randn(1, int(first(setting(config, "audio_channels", default=1))), 3200))
    n_samples = length
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        n_samples = (n_samples - 1) * stride + kernel
    return Example(torch.randn(1, n_samples))


def _bands_first(config: Any, length: int) -> Example:
    n_frames = 2 * int(setting(config, "max_source_positions", default=16 * length))
    return Example(torch.randn(1, _n_bands(config), n_frames))


def _frames_first(config: Any, length: int) -> Example:
    n_frames = int(setting(config, "max_length", default=0)) if hasattr(config, "frequency_stride") else 0
    return Example(torch.randn(1, n_frames or 16 * length, _n_bands(config)))


def _n_bands(config: Any) -> int:
    names = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim", "feature_size")
    return int(first(setting(config, *names, default=80)))


def _codebooks(config: Any, length: int) -> Example | None:
    """One row of tokens for each codebook."""
    n_books = setting(config, "num_codebooks")
    tokens = _tokens(config, length)
    return Example(tokens.value.expand(int(n_books), -1).contiguous(), tokens.span) if n_books else None


Maker = Callable[[Any, int], Example | None]  # None: not for such a config
# Each input and the shapes it may have, the likeliest first.
MAKERS: dict[str, tuple[Maker, ...]] = {
    "input_ids": (_tokens, _codebooks),
    "decoder_input_ids": (_tokens, _codebooks),
    "inputs": (_tokens, _image),
    "token_type_ids": (_token_types,),
    "attention_mask": (_mask,),
    "bbox": (_boxes,),
    "pixel_values": (_image, _video),
    "pixel_values_videos": (_video,),
    "input_values": (_wave, _frames_first),
    "input_features": (_bands_first, _frames_first),
}
SIGNALS = ("pixel_values", "input_values", "input_features", "pixel_values_videos")


def text_length(config: Any, length: int | None) -> int:
    """The asked length, or a short one that the model's positions allow."""
    positions = first(setting(config, *POSITIONS, default=None))
    limit = positions if isinstance(positions, int) and positions > 0 else None
    if length is not None and limit is not None and length > limit:
        raise DeadweightError(f"found length {length}; expected at most {limit}, the positions that the model has")
    return length or min(LENGTH, limit or LENGTH)


def candidates(module: nn.Module, config: Any, length: int | None = None) -> Iterator[Inputs]:
    """Inputs worth trying, the plainest first: the main input alone, then with a mask, then with other signals."""
    accepted = inspect.signature(module.forward).parameters
    names = _plain_names(module, config, accepted)
    signals = [name for name in SIGNALS if name in accepted and name not in names]
    for extra in ([], ["attention_mask"], signals[:1], [*signals[:1], "attention_mask"]):
        wanted = [*names, *(name for name in extra if name in accepted)]
        for choice in range(max((len(MAKERS[name]) for name in wanted), default=0)):
            inputs = _inputs(wanted, choice, config, text_length(config, length), accepted)
            if inputs is not None:
                yield inputs


def _plain_names(module: nn.Module, config: Any, accepted: Any) -> list[str]:
    main = getattr(module, "main_input_name", "input_ids")
    required = [n for n, p in accepted.items() if p.default is p.empty and n in MAKERS]
    names = [main] if main in MAKERS and main in accepted else []
    if setting(config, "is_encoder_decoder", default=False) and "decoder_input_ids" in accepted:
        names.append("decoder_input_ids")
    if "token_type_ids" in accepted and "input_ids" in names and int(getattr(config, "type_vocab_size", 1) or 1) > 1:
        names.append("token_type_ids")
    if "bbox" in accepted and "input_ids" in names:
        names.append("bbox")
    return list(dict.fromkeys([*names, *required]))


def _inputs(names: list[str], choice: int, config: Any, length: int, accepted: Any) -> Inputs | None:
    """The inputs of these names in one of their shapes; None where no input has such another shape."""
    made: dict[str, Example] = {}
    for name in names:
        makers = MAKERS[name]
        example = makers[min(choice, len(makers) - 1)](config, length) or makers[0](config, length)
        assert example is not None, "the first maker of a name makes something of every config"
        made[name] = example
    if choice and all(made[name].value.shape == _first_shape(name, config, length) for name in names):
        return None
    flags = {name: value for name, value in FLAGS.items() if name in accepted}
    spans = {name: example.span for name, example in made.items() if not example.value.is_floating_point()}
    return Inputs((), {name: example.value for name, example in made.items()} | flags, spans)


def _first_shape(name: str, config: Any, length: int) -> torch.Size | None:
    example = MAKERS[name][0](config, length)
    return example.value.shape if example else None


def example_inputs(module: nn.Module, config: Any, length: int | None = None) -> tuple[Inputs, str | None]:
    """The first inputs with which the model runs, and None; or the plainest ones, and why the model refuses them."""
    tried: list[tuple[Inputs, str]] = []
    for inputs in candidates(module, config, length):
        try:
            run(module, inputs)
        except Exception as error:  # noqa: BLE001 - the model's own code: any refusal means "try the next"
            tried.append((inputs, reason(error)))
        else:
            return inputs, None
    return tried[0] if tried else (Inputs(), "no known input name in the signature of its forward")


def left_out(module: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The signals (images, sound) that the model takes and this example leaves out."""
    accepted = inspect.signature(module.forward).parameters
    return tuple(name for name in SIGNALS if name in accepted and name not in inputs.kwargs)


@torch.no_grad()
def run(module: nn.Module, inputs: Inputs, watch: contextlib.AbstractContextManager[Any] | None = None) -> Any:
    """The model's output for these inputs, on the model's own device and precision; on the meta device, its shapes.

    `watch` is entered last, around the model alone.
    """
    watch = watch or contextlib.nullcontext()
    like = next(module.parameters(), torch.zeros(()))
    args, kwargs = inputs.on(like.device, like.dtype if like.is_floating_point() else None)
    if not like.is_meta:
        with watch:
            return module(*args, **kwargs)
    # Fake tensors, as when tracing: stock code asks no values of them, as it would of tensors on the meta device.
    # Torch logs a traceback for each op that refuses them; here a refusal is an answer.
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake as mode, silenced("torch._subclasses.fake_tensor"):
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), (args, kwargs)
        )
        with watch:
            return module(*args, **kwargs)
