"""`assert_no_deadweight` passes a clean model, and fails a wasteful one with a readable list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deadweight.audit.result import Audit
from deadweight.errors import DeadweightError
from deadweight.testing import assert_no_deadweight

Install = Callable[[object], list[dict]]


def test_a_clean_model_passes(fake_audit: Install, clean: Audit) -> None:
    fake_audit(clean)
    assert_no_deadweight(object())


def test_a_wasteful_model_fails_with_a_readable_list(fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(gpt2_like)
    with pytest.raises(AssertionError) as failure:
        assert_no_deadweight(object())
    assert str(failure.value).splitlines() == [
        "tiny/gpt2 has 32 redundant dimensions:",
        "  DW002 key-bias: h.0-1.attn.c_attn.bias[8:16] is dead (real), 16 numbers too many",
        "  DW003 value-bias: h.0-1.attn.c_attn.bias[16:24] is foldable (mode), 16 numbers too many",
        "`deadweight explain DW002` says why; ignore=['DW002', 'DW003'] accepts what is listed here.",
    ]


def test_gauges_count_only_on_request(fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(replace(gpt2_like, findings=gpt2_like.findings[4:]))
    assert_no_deadweight(object())
    with pytest.raises(AssertionError, match=r"DW009 query-key-basis: .* is a gauge \(real\), 64 numbers too many"):
        assert_no_deadweight(object(), gauges=True)


def test_what_folds_is_tolerated_where_only_the_dead_count(fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(replace(gpt2_like, findings=tuple(f for f in gpt2_like.findings if f.verdict != "dead")))
    assert_no_deadweight(object(), fail_on="dead")
    with pytest.raises(AssertionError, match="DW003"):
        assert_no_deadweight(object())


def test_a_finding_without_dof_wastes_nothing(fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(replace(gpt2_like, findings=(replace(gpt2_like.findings[0], dof=0),)))
    assert_no_deadweight(object())


def test_model_inputs_and_options_reach_the_audit(fake_audit: Install, clean: Audit) -> None:
    calls = fake_audit(clean)
    model = object()
    assert_no_deadweight(model, (1, 2), select=["key-bias"], ignore=["DW005"], training=True)
    expected = {"model": model, "inputs": (1, 2), "select": ("DW002",), "ignore": ("DW005",), "training": True}
    assert calls == [expected]


def test_a_model_that_could_not_be_audited_does_not_pass(fake_audit: Install, clean: Audit) -> None:
    fake_audit(replace(clean, untested="no clone runs"))
    with pytest.raises(AssertionError, match="could not be audited: no clone runs"):
        assert_no_deadweight(object())


def test_a_misspelt_law_is_an_error_not_a_pass(fake_audit: Install, clean: Audit) -> None:
    fake_audit(clean)
    with pytest.raises(DeadweightError, match="DW999"):
        assert_no_deadweight(object(), ignore=["DW999"])
