"""The coverage benchmark: what becomes of a type whose narrow clone takes too long, and how reasons are worded."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def coverage(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("coverage")


def endless_if(coverage: ModuleType, *slow: bool) -> Callable[..., dict[str, Any]]:
    def attempt(kind: str, model_type: str, *, as_narrow: bool) -> dict[str, Any]:
        if as_narrow in slow:
            raise coverage.Expired("more than 1 s")
        return {"status": "proofs", "reason": "", "form": "shallow"}

    return attempt


def test_a_narrow_clone_that_takes_too_long_gives_way_to_the_model_at_its_own_width(
    coverage: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "attempt", endless_if(coverage, True))
    result = coverage.timed("base", "toy", 1, True)
    assert (result.status, result.form) == ("proofs", "shallow, at its own width")
    assert coverage.timed("base", "toy", 1, False).form == "shallow"
    monkeypatch.setattr(coverage, "attempt", endless_if(coverage, True, False))
    assert coverage.timed("base", "toy", 1, True).status == "timeout"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("no narrow clone of /tmp/x1/config.json runs", "cannot be built: no narrow clone of its config runs"),
        ("ImportError: A requires the timm library", "its code needs the timm library, which is not installed here"),
        (
            "forward() missing 2 required positional arguments: 'action_embeds' and 'state'; expected",
            "its forward requires 'action_embeds' and 'state', of which no example is known",
        ),
        (
            "forward() missing 3 required positional arguments: 'ids', 'mask', and 'classe…",
            "its forward requires 'ids', 'mask' and more, of which no example is known",
        ),
    ],
)
def test_a_reason_is_in_words_and_names_no_folder(coverage: ModuleType, why: str, words: str) -> None:
    assert coverage.in_words(why) == words
