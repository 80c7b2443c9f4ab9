"""What a proof says of a parameter, and in which arithmetic it holds."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["dead", "folds", "gauge"]
Tier = Literal["bitwise", "real", "epsilon", "mode"]
