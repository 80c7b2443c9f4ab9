"""The result of an audit: findings, unknowns, and the account, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deadweight.audit.severity import SEVERITIES, Severity
from deadweight.notebook import Shown
from deadweight.proof.verdict import Tier, Verdict

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SourceLine:
    """The line of code to look at for a parameter, and what happens there."""

    file: str  # absolute
    line: int
    role: Literal["constructed", "used", "built"]  # the last: the function that builds the model

    @property
    def path(self) -> str:
        """The file relative to the working directory, where it lies inside."""
        path = Path(self.file)
        return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(path)

    def __str__(self) -> str:
        """For people: a file of an installed library without the folder of the environment."""
        return f"{self.path.rpartition('/site-packages/')[2]}:{self.line}"


@dataclass(frozen=True)
class Payoff:
    """Numbers that need not be stored, their bytes in the model's own precision, and FLOPs per token."""

    parameters: int = 0
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Visit:
    """A step of a proof at its place in the graph; operations that only move elements are left out."""

    node: str  # a parameter by its name, an operation by its module and its line of code
    op: str
    rule: str
    conclusion: str
    reads: tuple[int, ...] = ()  # earlier steps of this proof whose values it reads
    parameters: tuple[str, ...] = ()  # that it reads


@dataclass(frozen=True)
class Finding:
    """One law that holds for one parameter, or for a part of it."""

    code: str  # DW002
    law: str  # key-bias
    parameter: str  # the state-dict name
    slice: Pieces | None  # start:stop pieces along the first axis; None is the whole parameter
    elements: int  # how many stored numbers the slice holds
    dof: int  # how many dimensions of parameter space this finding makes redundant
    verdict: Verdict
    into: tuple[str, ...]  # the parameters that take over its effect, or that change along with it
    tier: Tier
    proof: tuple[str, ...]  # one line per step
    evidence: float | None = None  # largest |J·tangent| relative to a live direction; None: not measured
    unreplayed: int = 0  # steps of the proof that the checker did not replay: their values have too many elements
    note: str = ""  # a condition in words: "eval only: attention dropout is off"
    fix: str = ""  # what to write in the model's code
    source: SourceLine | None = None  # where to write it
    payoff: Payoff = Payoff()
    walk: tuple[Visit, ...] = field(default=(), compare=False, repr=False)  # the proof's part of the graph

    @property
    def severity(self) -> Severity:
        return SEVERITIES[self.verdict]

    def fails(self, mildest: Verdict) -> bool:
        """Whether it has dof and is as severe as this verdict or more: dead, then folds, then gauge."""
        order = list(SEVERITIES)
        return self.dof > 0 and order.index(self.verdict) <= order.index(mildest)


@dataclass(frozen=True)
class Unknown:
    """A parameter that is almost dead, with the op that blocks the proof; or a zero gradient that no law explains."""

    parameter: str
    blocked_by: str | None  # the op; None for a zero gradient that no law explains
    why: str


@dataclass(frozen=True)
class Completeness:
    """How many redundant dimensions there are, and how many of them the laws explain."""

    measured: int
    explained: int
    parameters: int = 0  # of the model it was measured on
    by_law: tuple[tuple[str, int], ...] = ()  # rank that each law adds, in the order of the laws
    unsound: int = 0  # tangents that do not lie in the null space: must be 0
    clone: str = ""  # what it was measured on, in words

    @property
    def measured_on(self) -> str:
        """What it was measured on, in words, with its size."""
        known = not self.parameters or "parameters" in self.clone
        return self.clone if known else f"{self.clone}, {self.parameters:,} parameters"


@dataclass(frozen=True)
class Opened:
    """How the model was opened, for a reader who wants to open it again."""

    live: bool = False  # a module in memory, which no command can open
    inputs: str = ""  # as after --inputs; empty: none were given, or tensors in memory
    live_inputs: bool = False  # tensors in memory
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Audit(Shown):
    """The result of an audit of one model."""

    model: str
    parameters: int
    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...] = ()
    completeness: Completeness | None = None
    untraced: str | None = None  # the reason, where there are no proofs but only evidence
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0
    untested: str | None = None  # the reason, where the model was traced but no evidence could be taken
    uncounted: str | None = None  # the reason, where `complete` was asked for and nothing could be counted
    specialised: str | None = None  # where Python reads values, if the model was traced with those of the example
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)  # of every parameter, by name
    opened: Opened = field(default=Opened(), repr=False)

    def __repr__(self) -> str:
        """One line, not every proof: an audit at a prompt or in a failing test is read by a person."""
        words = f"{self.redundant:,} of {self.parameters:,} dimensions are redundant, {len(self.findings):,} findings"
        return f"<Audit of {self.model!r}: {words}, {len(self.unknown):,} unknown; print() shows the report>"

    @property
    def unaudited(self) -> str | None:
        """Why an audit without findings means nothing: the model was not traced, or no evidence could be taken."""
        return self.untraced or (self.untested if not self.findings else None)

    @property
    def redundant(self) -> int:
        return sum(f.dof for f in self.findings)


def sum_payoffs(findings: Iterable[Finding]) -> Payoff:
    """What leaving out all of them saves."""
    payoffs = [f.payoff for f in findings]
    return Payoff(sum(p.parameters for p in payoffs), sum(p.bytes for p in payoffs), sum(p.flops for p in payoffs))
