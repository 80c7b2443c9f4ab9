"""The result of an audit: findings, unknowns, and the account, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from deadweight.notebook import Shown
from deadweight.proof.verdict import Tier, Verdict

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Visit:
    """A step of a proof at its place in the graph; operations that only move elements are left out."""

    node: str  # in the graph, or the parameter's state-dict name
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
    walk: tuple[Visit, ...] = field(default=(), compare=False, repr=False)  # the proof's part of the graph

    def counts(self, *, gauges: bool = False) -> bool:
        """Whether a check fails for it: it could be left out. Gauges, which every transformer has, count on request."""
        return self.dof > 0 and (gauges or self.verdict != "gauge")


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
    specialised: str | None = None  # where Python reads values, if the model was traced with those of the example
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)  # of every parameter, by name

    @property
    def unaudited(self) -> str | None:
        """Why an audit without findings means nothing: the model was not traced, or no evidence could be taken."""
        return self.untraced or (self.untested if not self.findings else None)

    @property
    def redundant(self) -> int:
        return sum(f.dof for f in self.findings)
