"""What is known of a parameter after a rewrite, and therefore need not be stored."""

from __future__ import annotations

from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """Every element has this value: 0 for a bias, 1 for a gain (0 where the model stores the gain less one)."""

    parameter: str
    value: float


@dataclass(frozen=True)
class ZeroPlaces:
    """Zero at these places of an axis; for a matrix only in these rows of the other axis (None: in all)."""

    parameter: str
    axis: int
    places: Index
    others: Index | None = None


@dataclass(frozen=True)
class IdentityBlocks:
    """Each block of rows (places along `axis`) is the identity matrix in these columns."""

    parameter: str
    axis: int
    blocks: tuple[Index, ...]
    columns: Index


@dataclass(frozen=True)
class Passed:
    """A BatchNorm that only adds its shift now; `before` is the layer whose output it reads."""

    module: str
    before: str


Fact = Constant | ZeroPlaces | IdentityBlocks | Passed
