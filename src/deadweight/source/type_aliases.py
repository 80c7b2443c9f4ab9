"""Names for values whose types are known to a model's own code only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # help and explain do without torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig

ModelLike: TypeAlias = "nn.Module | str | Path"  # a module; a folder, a hub id, a file; package.module:name
ExampleInputs: TypeAlias = (
    "Tensor | Sequence[Any] | Mapping[str, Any] | None"  # one tensor, or arguments, or "2x64:int"
)
Config: TypeAlias = "PretrainedConfig"  # of whichever class
Setting: TypeAlias = Any  # one value of a config: a number, a string, a list, or nested settings
RawConfig: TypeAlias = dict[str, Setting]  # config.json as it is read
Leaf: TypeAlias = Any  # a tensor, or anything else, among the arguments or results of a call
Arguments: TypeAlias = tuple[Leaf, ...]  # of a call, by position
Keywords: TypeAlias = dict[str, Leaf]  # of a call, by name
Options: TypeAlias = dict[str, Any]  # keyword arguments of a function of torch or transformers
JsonObject: TypeAlias = dict[str, Any]  # plain data, as it is written to a file
PreTrained: TypeAlias = Any  # a model of transformers, of whichever class
AutoClass: TypeAlias = Any  # one of the Auto classes of transformers
Tokenizer: TypeAlias = Any  # a tokenizer of transformers, of whichever class
