"""What a reader can do about findings: the fix, what it saves, when reducing a checkpoint is worth it."""

from __future__ import annotations

from collections.abc import Iterable

from deadweight.audit.result import Audit, Finding, Payoff, sum_payoffs
from deadweight.report.text import count, percent, plural

LITTLE, SOME = 0.01, 0.05  # shares of the parameters below which removing them from a checkpoint hardly pays
DOF = "dof: degrees of freedom, how many numbers could be left out. share: of all parameters."
PROOF_WORDS = (
    ("shifted", "the value changes by adding something; the step says along which axes the sum is the same"),
    ("turned alike", "every vector is multiplied by the same matrix: a change of basis"),
    ("undone", "the next weight takes the change back; from here on every value is as before"),
    ("scaled", "the value is multiplied by one number"),
)


def savings(payoff: Payoff) -> str:
    """What a fix saves, in words."""
    if not payoff.parameters:
        return "nothing"
    flops = f", {plural(payoff.flops, 'FLOP')} per token" if payoff.flops else ""
    return f"{plural(payoff.parameters, 'number')}, {in_units(payoff.bytes)}{flops}"


def worth_of(audit: Audit) -> list[tuple[str, str]]:
    """When to change the code and when to reduce a checkpoint, with the numbers of this model."""
    avoidable = [f for f in audit.findings if f.fails("folds")]
    rows = []
    if avoidable:
        rows.append(("new model", f"leaving out what is dead or folds saves {savings(sum_payoffs(avoidable))}."))
    if audit.redundant:
        rows.append(("trained model", reduce_words(audit.findings, audit.parameters)))
    return rows


def reduce_words(findings: Iterable[Finding], parameters: int) -> str:
    """What `reduce` could do for a checkpoint, and whether that is worth it."""
    redundant = sum_payoffs(findings).parameters
    share = redundant / max(parameters, 1)
    verdict = "not worth it for size alone" if share < LITTLE else "a small gain" if share < SOME else "worth trying"
    return (
        f"`deadweight reduce` removes at most {count(redundant)} ({percent(redundant, parameters)}): {verdict}. "
        "The slim layout is smaller, not always faster, and loads with its own code; `--layout stock` keeps all shapes "
        "and sets redundant numbers to constants, for tools that need the original class."
    )


def in_units(n_bytes: int) -> str:
    """Bytes for people, in powers of a thousand."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if n_bytes >= 1000**power:
            return f"{n_bytes / 1000**power:,.1f} {unit}"
    return plural(n_bytes, "byte")
