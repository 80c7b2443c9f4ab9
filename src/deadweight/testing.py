"""For your own test suite: a test fails if a model has redundant parameters.

from deadweight.testing import assert_no_deadweight

def test_the_model_wastes_nothing():
    assert_no_deadweight(MyModel(small_config), (tokens,), ignore=["DW005"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deadweight
from deadweight.laws.page import law_codes
from deadweight.proof.verdict import Verdict
from deadweight.report.audit_rows import Group, group_findings
from deadweight.report.text import plural, printable
from deadweight.source.type_aliases import ExampleInputs, ModelLike


def assert_no_deadweight(
    model: ModelLike,
    inputs: ExampleInputs = None,
    *,
    select: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    gauges: bool = False,
    fail_on: Verdict = "folds",
    **options: Any,
) -> None:
    """Raise AssertionError, with a readable list, if the audit of `model` finds redundant parameters.

    The findings that count are those of `deadweight audit --check`: verdict *dead* or *folds*, and at least one dof.
    `fail_on="dead"` tolerates those that fold. Gauges count only with `gauges=True` or `fail_on="gauge"`: every
    transformer has some, and they cannot simply be deleted. A model that could not be audited fails too. `select` and
    `ignore` are law codes or names; the other options are those of `deadweight.audit`.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the list, not this function
    wanted, unwanted = law_codes(select), law_codes(ignore)
    audit = deadweight.audit(model, inputs, select=wanted, ignore=unwanted, **options)
    groups = group_findings(f for f in audit.findings if f.fails("gauge" if gauges else fail_on))
    if groups:
        raise AssertionError(_message(printable(audit.model), groups))
    if audit.unaudited is not None:
        raise AssertionError(f"{printable(audit.model)} could not be audited: {printable(audit.unaudited)}")


def _message(model: str, groups: list[Group]) -> str:
    total = plural(sum(g.dof for g in groups), "redundant dimension")
    rows = [line for g in groups for line in _lines(g)]
    laws = list(dict.fromkeys(g.code for g in groups))
    advice = f"`deadweight explain {laws[0]}` says why; ignore={laws!r} accepts what is listed here."
    return "\n".join([f"{model} has {total}:", *map(printable, rows), advice])


def _lines(g: Group) -> list[str]:
    """What is redundant, where it is built, and what to write instead."""
    source = g.findings[0].source
    where = f" ({source})" if source is not None else ""
    row = f"  {g.code} {g.law}: {g.where} is {_verdict(g)}, {plural(g.dof, 'number')} too many{where}"
    return [row, f"      fix: {g.fix}"] if g.fix else [row]


def _verdict(g: Group) -> str:
    return {"dead": "dead", "folds": "foldable", "gauge": "a gauge"}[g.verdict] + f" ({g.tier})"
