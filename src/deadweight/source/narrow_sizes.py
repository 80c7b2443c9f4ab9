"""How narrow a clone is: the sizes that are tried, and the limits on its parameters."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 11  # tokens


@dataclass(frozen=True)
class Size:
    """How narrow the clone is: all narrow values follow from this."""

    width: int = 8
    length: int = 5  # positions that are used
    spare: int = 0  # more positions: some families reserve a few for padding
    heads: int = 2
    layers: int = 2
    repeat: int = 1  # layers of each kind
    vocabulary: int = VOCABULARY
    sections: bool = False  # write rotary sections into the config, which some code expects there

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def inner(self) -> int:
        return self.width * 3 // 2

    @property
    def image(self) -> int:
        return self.width // 2


SMALL = 20_000  # parameters: up to here a model is its own narrow clone
LONGEST = 16  # positions: a small model with more of them is run on fewer
SIZES = (
    Size(8),
    Size(8, spare=2),
    Size(8, repeat=2),
    Size(8, sections=True),
    Size(8, spare=8),
    Size(16, spare=2),
    Size(32, spare=2),
    Size(64, spare=2),
)
PARTLY = (Size(64, spare=2), Size(8, spare=2))  # sizes for single settings, where the model runs with them
AFFORDABLE = 1_000_000  # parameters: up to here a trial is run with values, larger ones on fake tensors
LARGEST = 20_000_000  # parameters: the gradients of a larger clone take too long
