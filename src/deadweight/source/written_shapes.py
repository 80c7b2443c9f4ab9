"""Example inputs as people write them on a command line: `2x64:int`, `mask=2x64:bool`. Nothing here needs torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable

SAVED = ".safetensors"  # the end of a file of tensors
WRITTEN = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<kind>int|float|bool)(?::(?P<high>\d+))?)?"
)
EXPECTED = (
    "sizes with x between them and a kind (2x64:int, 2x3x32x32, mask=2x64:bool, 2x64:int:1000 for numbers below 1000), "
    "several with commas between them, or a .safetensors file"
)
LARGEST = 2**28  # elements: 1 GiB of floats


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor: its shape, the kind of its numbers, the bound of integers, and the argument that it is for."""

    shape: tuple[int, ...]
    kind: str = "float"
    high: int | None = None
    name: str = ""

    @property
    def written(self) -> str:
        """As after --inputs."""
        kind = f":{self.kind}" if self.kind != "float" else ""
        return "x".join(map(str, self.shape)) + kind + (f":{self.high}" if self.high is not None else "")


def check_written(written: str | None) -> None:
    """Raise now for inputs that cannot be read later: before torch is imported."""
    if written is not None and not written.endswith(SAVED):
        parse_tensors(written)


def parse_tensors(written: str) -> tuple[WrittenTensor, ...]:
    """The tensors of one call; raises for an argument that is named twice."""
    tensors = tuple(map(parse_tensor, written.split(",")))
    names = [t.name for t in tensors if t.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DeadweightError(f"found inputs for {printable(twice)} twice; expected one shape for every argument")
    return tensors


def parse_tensor(word: str) -> WrittenTensor:
    match = WRITTEN.fullmatch(word.strip())
    if match is None:
        raise DeadweightError(f"found inputs {printable(word)!r}; expected {EXPECTED}")
    shape = tuple(map(int, match["shape"].split("x")))
    if math.prod(shape) > LARGEST or 0 in shape:
        raise DeadweightError(f"found inputs {printable(word)!r}; expected 1 to {LARGEST:,} numbers: an example")
    high = None if match["high"] is None else int(match["high"])
    if high == 0:
        raise DeadweightError(f"found inputs {printable(word)!r}; expected a bound of 1 or more")
    return WrittenTensor(shape, match["kind"] or "float", high, match["name"] or "")
