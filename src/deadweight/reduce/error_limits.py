"""When two models count as the same function: limits on their errors, by the noise floor of the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deadweight.errors import DeadweightError
from deadweight.graph.node import Graph

EXACT = 1e-10  # relative, in float64: a narrow model gives 1e-15, a deep trained one 1e-13
FLOORS = 3.0  # how many times its own rounding noise a model may have after the reduction; both are simulated
GROSS = 10.0  # the same for measured noise, which depends on the machine; a mistake shows a thousandfold


@dataclass(frozen=True)
class Noise:
    """The rounding error of an output relative to its size, simulated: the same number on every machine."""

    reduced: float
    original: float

    @property
    def growth(self) -> float:
        return self.reduced / max(self.original, 1e-16)

    @property
    def small(self) -> bool:
        return self.reduced <= max(FLOORS * self.original, EXACT)


@dataclass(frozen=True)
class Error:
    """The error of one output, relative to its size."""

    output: str
    float64: float  # reduced against original, both in float64
    own: float | None = None  # reduced as it runs in its own precision, against the original in float64
    floor: float | None = None  # the original as it runs in its own precision, against itself in float64
    noise: Noise | None = None
    stored: bool = False  # both were read from files, with weights that are rounded to their own precision

    @property
    def same_in_float64(self) -> bool:
        """Whether only rounding differs: that of the calculation, and of the weights as they are stored."""
        stored = FLOORS * self.noise.original if self.stored and self.noise is not None else 0.0
        return self.float64 <= max(EXACT, stored)

    @property
    def same(self) -> bool:
        runs = self.own is None or self.floor is None or self.own <= max(GROSS * self.floor, EXACT)
        return self.same_in_float64 and runs and (self.noise is None or self.noise.small)


@dataclass(frozen=True)
class Verification:
    """The errors of all outputs, over all inputs that were tried."""

    errors: tuple[Error, ...]
    inputs: str = ""

    @property
    def same(self) -> bool:
        return all(e.same for e in self.errors)

    @property
    def worst(self) -> Error:
        return max(self.errors, key=lambda e: (e.float64 > EXACT, e.noise.growth if e.noise else 0.0, e.float64))


class DifferentError(DeadweightError):
    """The reduced model is not the same function as the original; it is not written."""

    def __init__(self, message: str, verification: Verification) -> None:
        super().__init__(message)
        self.verification = verification


def require_same(verification: Verification) -> Verification:
    """The verification, if both models are the same function; else raises."""
    if verification.same:
        return verification
    worst = verification.worst
    noisy = f" and by {worst.own:.1e} in its own precision (noise floor {worst.floor:.1e})" if worst.own else ""
    raise DifferentError(
        f"the reduced model is not the same function: {worst.output} differs by {worst.float64:.1e} in float64"
        f"{noisy}; nothing was written",
        verification,
    )


def noise_floor(graph: Graph, errors: Sequence[float]) -> list[float]:
    """The errors of a model's own precision, at least half a unit in the last place."""
    kinds = [node.dtype for node in map(graph.node, graph.outputs) if node.is_float]
    least = [torch.finfo(dtype or torch.float64).eps / 2 for dtype in kinds]
    return [max(pair) for pair in zip(errors, least, strict=True)]
