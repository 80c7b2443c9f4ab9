"""A proof as data: what happened at each node, by which rule; and why a proof stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deadweight.graph.node import Node

Kind = Literal["starts", "passes", "absorbed"]  # where the change is made; an operation; a parameter takes it over


@dataclass(frozen=True)
class Step:
    """One application of a rule."""

    node: str
    op: str
    rule: str  # the rule's theorem, in one line
    conclusion: str  # in words: "shifted, constant along the keys"
    value: Any = field(default=None, compare=False, repr=False)  # what is known after the step; None: unchanged
    kind: Kind = "passes"

    def __str__(self) -> str:
        return f"{self.node} [{self.op}]: {self.rule} → {self.conclusion}"


LARGEST = 1 << 24  # elements of a value whose labels are told apart one by one: 128 MiB


def refuse_large(node: Node, *stored: tuple[int, ...]) -> None:
    """Values too large to label (expert weights gathered per token, say) block a proof instead of filling memory.

    `stored` are the shapes that labels really take: what is repeated along an axis is kept once.
    """
    count = math.prod(torch.broadcast_shapes(*stored)) if stored else math.prod(node.shape)
    if count > LARGEST:
        raise Blocked(node.name, node.op, f"{count:,} elements are too many to tell apart")


class Blocked(Exception):
    """The proof stops at this node: the operation may change the result."""

    def __init__(self, node: str, op: str, why: str) -> None:
        super().__init__(f"{op} at {node}: {why}")
        self.node, self.op, self.why = node, op, why
