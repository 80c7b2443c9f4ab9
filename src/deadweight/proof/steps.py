"""A proof as data: what happened at each node, by which rule; and why a proof stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One application of a rule."""

    node: str
    op: str
    rule: str  # the rule's theorem, in one line
    conclusion: str  # in words: "shifted, constant along the keys"
    value: Any = field(default=None, compare=False, repr=False)  # what is known after the step; None: unchanged

    def __str__(self) -> str:
        return f"{self.node} [{self.op}]: {self.rule} → {self.conclusion}"


class Blocked(Exception):
    """The proof stops at this node: the operation may change the result."""

    def __init__(self, node: str, op: str, why: str) -> None:
        super().__init__(f"{op} at {node}: {why}")
        self.node, self.op, self.why = node, op, why
