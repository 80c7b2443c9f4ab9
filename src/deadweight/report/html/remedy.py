"""What to do about a finding: in the model's code, and by `reduce`, with the command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath

from deadweight.audit.result import Audit, sum_payoffs
from deadweight.laws.catalogue import every_law
from deadweight.laws.law import Kept, Law
from deadweight.report.advice import savings
from deadweight.report.audit_rows import Group
from deadweight.report.html.page import safe

DEED = {
    "dead": "removes it",
    "folds": "adds its effect to the parameters named above, and removes it",
    "gauge": "chooses the basis or scale in which these numbers are constants, and does not store them",
}


@dataclass(frozen=True)
class Remedy:
    """What a reader can do about the findings of one row."""

    in_code: str  # the fix, as a sentence
    by_reduce: str  # what `reduce` does
    saves: int  # numbers that the slim layout stores less, at most
    saves_text: str
    command: str  # empty if `reduce` leaves it


def remedy_of(g: Group, audit: Audit) -> Remedy:
    law = law_of(g.code)
    advice = as_sentence(g.fix)
    if law is None or isinstance(law.rewriting, Kept):
        why = law.rewriting.why if law is not None and isinstance(law.rewriting, Kept) else "this law has no rewrite"
        return Remedy(advice, f"reduce leaves it: {why}", 0, "nothing", "")
    payoff = sum_payoffs(g.findings)
    if not payoff.parameters:
        return Remedy(advice, "reduce leaves it: nothing would be stored less", 0, "nothing", "")
    slim_only = law.rewriting.slim_only
    layout = f" Slim layout only: {slim_only}." if slim_only else " In the stock layout it becomes constant."
    return Remedy(
        in_code=advice,
        by_reduce=f"reduce {DEED[g.verdict]}.{layout}",
        saves=payoff.parameters,
        saves_text=f"up to {savings(payoff)}",
        command=reduce_command(audit, g.code),
    )


def as_sentence(fix: str) -> str:
    return safe(f"{fix[0].upper()}{fix[1:]}.") if fix else ""


def reduce_command(audit: Audit, code: str = "") -> str:
    """The command that reduces the same model on the same inputs; in Python, for what is in memory only."""
    opened = audit.opened
    if opened.live or opened.live_inputs:
        return reduce_call(audit, code)
    options = [f" --select {code}"] if code else []
    options += [f" --inputs {shlex.quote(safe(opened.inputs))}"] if opened.inputs else []
    options += [" --trust-remote-code"] if opened.trust_remote_code else []
    return f"deadweight reduce {checkpoint_name(audit.model)} OUT{''.join(options)}"


def reduce_call(audit: Audit, code: str) -> str:
    """The same as a call: `model` and `inputs` are the reader's own variables."""
    opened = audit.opened
    arguments = ["model" if opened.live else repr(safe(audit.model)), '"OUT"']
    arguments += [f'select=["{code}"]'] if code else []
    if opened.live_inputs or opened.inputs:
        arguments.append("inputs=inputs" if opened.live_inputs else f"inputs={safe(opened.inputs)!r}")
    arguments += ["trust_remote_code=True"] if opened.trust_remote_code else []
    return f"deadweight.reduce({', '.join(arguments)})"


def checkpoint_name(model: str) -> str:
    """A bare config has no weights: its folder may."""
    path = PurePath(model)
    return shlex.quote(safe(str(path.parent) if path.name == "config.json" else model))


@cache
def law_of(code: str) -> Law | None:
    return next((law for law in every_law().laws if law.title.code == code), None)
