"""What `verify` says about two models that are not the same function."""

from __future__ import annotations

from deadweight.reduce.error_limits import Error, Noise
from deadweight.report.reduction import difference


def test_models_that_differ_only_in_rounding_are_not_said_to_differ_in_float64() -> None:
    rough = difference(Error("logits", 1.9e-7, noise=Noise(9e-7, 1e-7), stored=True))
    assert rough.startswith("rounding errors in its own precision grow by a factor of 9.0 (at most 3 is allowed)")
    assert "in float64 both are the same function" in rough


def test_models_that_differ_in_float64_are_said_to_by_how_much() -> None:
    assert difference(Error("logits", 0.5)) == "logits differs by 5.0e-01 in float64"
    both = difference(Error("logits", 0.5, noise=Noise(1e-3, 1e-7), stored=True))
    assert both.startswith("logits differs by 5.0e-01 in float64; rounding errors") and "10,000.0" in both
