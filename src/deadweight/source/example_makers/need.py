"""The argument and the result of a maker of example inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deadweight.source.inputs import Span
from deadweight.source.type_aliases import Config, Setting

NESTED = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "thinker_config", "llm_config")


@dataclass(frozen=True)
class Need:
    """The config, the number of tokens, and the names of all inputs that are made together."""

    config: Config
    length: int
    names: tuple[str, ...] = ()

    def get(self, *names: str, default: Setting = None) -> Setting:
        return setting(self.config, *names, default=default)

    def number(self, *names: str, default: int) -> int:
        return int(first(self.get(*names, default=default)))


@dataclass(frozen=True)
class Example:
    """One example tensor, and the integers from which it may be redrawn (None: it stays as it is)."""

    value: torch.Tensor
    span: Span | None = None
    fixed: bool = False  # floats that stay as they are


Maker = Callable[[Need], Example | None]  # None: the config has no such input


def holders(config: Config) -> Iterator[Config]:
    """The config and its nested configs, those with the most common names first."""
    yield config
    others = [key for key in getattr(config, "sub_configs", None) or () if key not in NESTED]
    for key in (*NESTED, *others):
        if (inner := getattr(config, key, None)) is not None:
            yield inner


def setting(config: Config, *names: str, default: Setting = None) -> Setting:
    """The first of these attributes that the config, or a nested config, has."""
    for holder in holders(config):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None:
                return value
    return default


def first(value: Setting) -> Setting:
    """A number from a number or from the first of a list of them."""
    return value[0] if isinstance(value, (list, tuple)) and value else value
