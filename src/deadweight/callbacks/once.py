"""One audit before the first step: which parameters cannot learn?"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import deadweight
from deadweight.audit.result import Audit
from deadweight.errors import DeadweightError
from deadweight.laws.page import law_codes
from deadweight.report.audit_rows import group_findings
from deadweight.report.text import plural, printable
from deadweight.source.guessed_inputs import required_arguments
from deadweight.source.type_aliases import ExampleInputs

Action = Literal["warn", "stop"]
ROWS = 2  # of a batch: enough for proofs, and quick


class DeadweightWarning(UserWarning):
    """A model that is about to be trained has parameters that cannot learn."""


@dataclass(eq=False)
class OneAudit:
    """Audits the first model that it is shown, in training mode, and no other."""

    action: Action = "warn"
    inputs: ExampleInputs = field(default=None, kw_only=True)  # None: a few rows of the data
    select: str | Sequence[str] = field(default=(), kw_only=True)
    ignore: str | Sequence[str] = field(default=(), kw_only=True)
    result: Audit | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.action not in ("warn", "stop"):
            raise DeadweightError(f"found action={self.action!r}; expected 'warn' or 'stop'")

    def audit_once(self, model: nn.Module, inputs: ExampleInputs) -> None:
        """Warn, or raise DeadweightError, if parameters are dead: their gradient is zero whatever the data are."""
        if self.result is not None:
            return
        chosen = law_codes(self.select), law_codes(self.ignore)
        with torch.random.fork_rng():  # training must draw the same numbers with and without the audit
            self.result = deadweight.audit(model, inputs, training=True, select=chosen[0], ignore=chosen[1])
        words = self.describe(self.result)
        if words and self.action == "stop":
            raise DeadweightError(words)
        if words:
            warnings.warn(words, DeadweightWarning, stacklevel=3)

    def describe(self, result: Audit) -> str:
        """What cannot learn, in a few lines; empty if everything can."""
        if result.unaudited is not None:
            return f"{printable(result.model)} could not be audited: {printable(result.unaudited)}"
        groups = group_findings(f for f in result.findings if f.fails("dead"))
        rows = [f"{g.code} {g.law}: {printable(g.where)} ({g.fix})" for g in groups]
        total = plural(sum(g.dof for g in groups), "number")
        return "; ".join([f"{total} of {printable(result.model)} cannot learn", *rows]) if rows else ""


def example_of(model: nn.Module, batch: Any) -> ExampleInputs:
    """A few rows of a batch, as arguments of forward; raises with the way to give inputs where that is not clear."""
    arguments = inspect.signature(model.forward).parameters
    rows = pytree.tree_map_only(Tensor, lambda tensor: tensor[:ROWS], batch)
    if isinstance(rows, Mapping):
        known = {str(name): value for name, value in rows.items() if str(name) in arguments}
        if known:
            return known
    if isinstance(rows, (tuple, list)) and rows:
        return tuple(rows[: max(required_arguments(model), 1)])
    if isinstance(rows, Tensor):
        return (rows,)
    raise DeadweightError(
        f"found a batch of type {type(batch).__name__}; expected a tensor, a tuple or a dict of forward's arguments: "
        "pass inputs= to the callback"
    )
