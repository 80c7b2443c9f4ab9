"""Measurements on a clone of the model: evidence for every claim, and the account of all redundant dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from deadweight.audit.account import COUNTABLE, Account
from deadweight.audit.best_account import FIRST, CloneChoice, best_account, surplus
from deadweight.audit.checker import replay
from deadweight.audit.claim_matching import ClaimIdentity, Role, identities, roles
from deadweight.audit.evidence import Draw, Gradients, claim_evidence, gradients
from deadweight.audit.path_evidence import on_path
from deadweight.audit.result import Completeness, Unknown
from deadweight.audit.same_function import CLOSE, program_error, same_buffers
from deadweight.audit.zero_gradients import unexplained_zeros
from deadweight.claims.claim import Claim
from deadweight.claims.point import Point, Values
from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind, index_ranges
from deadweight.graph.canonical import PROBABILITIES, canonical, read_as_probabilities
from deadweight.graph.node import Graph
from deadweight.graph.norm_cores import without_epsilon
from deadweight.graph.pieces import stored_part
from deadweight.graph.trace import TraceError, first_line, trace
from deadweight.laws.catalogue import Catalogue
from deadweight.search.prover import Prover
from deadweight.source.model import Source
from deadweight.source.narrow_clone import narrow
from deadweight.source.randomise import randomise

T = TypeVar("T")
AFFORDABLE = 200_000_000  # parameters: a larger model without a config, hence without a narrow clone, is not measured


@dataclass(frozen=True)
class Clone:
    """A model that is small enough to measure, traced, with what was proved about it."""

    graph: Graph
    prover: Prover
    values: Values
    draw: Draw
    words: str
    roles: dict[str, Role] = field(default_factory=dict)  # of its parameters; empty where the model is its own clone
    apart: float | None = None  # the difference between its traced program and the module; None: not comparable


@dataclass
class Measured:
    """The measurements on the clone, to be looked up by claims about the model."""

    identities: dict[int, ClaimIdentity] = field(default_factory=dict)  # of the claims about the model
    tested: set[ClaimIdentity] = field(default_factory=set)  # claims about the clone
    evidence: dict[ClaimIdentity, float] = field(default_factory=dict)
    faults: dict[ClaimIdentity, str] = field(default_factory=dict)  # proofs that do not replay on numbers
    unreplayed: dict[ClaimIdentity, int] = field(default_factory=dict)  # steps that were too large to replay
    completeness: Completeness | None = None
    unexplained: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()
    untested: str | None = None  # why no evidence could be taken
    uncounted: str | None = None  # why there is no account, where one was asked for

    def evidence_of(self, claim: Claim) -> float | None:
        return max(self.of_counterparts(claim, self.evidence), default=None)

    def refuses(self, claim: Claim) -> bool:
        return bool(self.of_counterparts(claim, self.faults))

    def unreplayed_steps(self, claim: Claim) -> int:
        return max(self.of_counterparts(claim, self.unreplayed), default=0)

    def of_counterparts(self, claim: Claim, known: dict[ClaimIdentity, T]) -> list[T]:
        """The values for the claim's counterpart; if that is not certain, for all claims that it may be."""
        own = self.identities.get(id(claim))
        if own is None:
            return []
        if own in self.tested:
            return [known[own]] if own in known else []
        return [value for other, value in known.items() if (other.law, other.role) == (own.law, own.role)]


def measure(source: Source, prover: Prover, laws: Catalogue, *, complete: bool) -> Measured:
    """Evidence for every claim, where the model can be measured; and the account, if `complete`."""
    measured = Measured()
    try:
        clone = clone_of(source, prover, laws)
    except (DeadweightError, TraceError) as error:
        measured.untested = str(error)
        measured.uncounted = str(error) if complete else None
        measured.notes = (f"no evidence was taken: {error}",)
        return measured
    known = {} if clone.prover is prover else roles(source.module)
    measured.identities = identities(prover.claims, prover.graph, known)
    try:
        take_evidence(source, clone, measured)
    except (RuntimeError, IndexError) as error:  # no derivative, no float64 kernel, or an index that is out of range
        measured.untested = first_line(error)
        measured.notes += (f"no evidence was taken: {measured.untested}",)
    if complete:
        try:
            refuse_large_account(clone)
            account = best_account(clone, partial(another_clone, source, prover, laws), widen=source.config is not None)
        except (DeadweightError, RuntimeError, NotImplementedError) as error:
            measured.uncounted = first_line(error)
            return measured
        measured.completeness = account.completeness
        measured.unexplained += tuple(shortfall(clone, account))
    return measured


def refuse_large_account(clone: Clone) -> None:
    """Raise if the clone has too many parameters: the time of an account grows with the cube of their number."""
    count = sum(clone.values[n].numel() for n in clone.graph.parameters)
    if count > COUNTABLE:
        raise DeadweightError(
            f"{clone.words} has {count:,} parameters; expected at most {COUNTABLE:,}: build the model smaller"
        )


def take_evidence(source: Source, clone: Clone, measured: Measured) -> None:
    """Replay and test every claim about the clone; list zero gradients that no claim explains."""
    if clone.apart is not None and clone.apart > CLOSE:
        refuse_all(clone, measured)
        return
    known = identities(clone.prover.claims, clone.graph, clone.roles)
    measured.tested.update(known.values())
    point = Point(clone.graph, clone.values, clone.draw(2))
    replay_claims(clone, known, point, measured)
    zero = test_claims(clone, known, point, measured)
    zeros = unexplained_zeros(clone.prover.claims, clone.graph, clone.values, clone.draw, zero)
    measured.unexplained += tuple(zeros)
    test_epsilon_claims(clone, known, point, measured)


def refuse_all(clone: Clone, measured: Measured) -> None:
    """Refuse all claims: the traced program is not the function of the model."""
    known = identities(clone.prover.claims, clone.graph, clone.roles)
    measured.tested.update(known.values())
    why = f"the traced program is not the same function as the model (its outputs differ by {clone.apart:.1e})"
    measured.faults.update(dict.fromkeys(known.values(), why))
    measured.unexplained += (Unknown("*", None, f"{why}: no finding is reported; please report the model"),)


def replay_claims(clone: Clone, known: dict[int, ClaimIdentity], point: Point, measured: Measured) -> None:
    """Replay every claim on numbers."""
    replayed = replay(clone.prover.claims, point)
    for place, claim in enumerate(clone.prover.claims):
        if place in replayed.faults:
            fault = measured.faults[known[id(claim)]] = replayed.faults[place]
            why = f"{claim.code}: the proof does not replay: {fault}"
            measured.unexplained += (Unknown(clone.graph.parameters[claim.node], None, why),)
        if place in replayed.skipped:
            measured.unreplayed[known[id(claim)]] = replayed.skipped[place]


def test_claims(clone: Clone, known: dict[int, ClaimIdentity], point: Point, measured: Measured) -> Values:
    """Test every claim by gradients, but those for ε = 0; the elements whose gradients are all zero."""
    grads = gradients(clone.graph, clone.values, clone.draw)
    if not grads.draws:
        measured.notes += ("no gradients were taken: they are not finite for any of the inputs drawn",)
    note_evidence([c for c in clone.prover.claims if c.tier != "epsilon"], known, point, grads, measured)
    return grads.zero_elements()


def test_epsilon_claims(clone: Clone, known: dict[int, ClaimIdentity], point: Point, measured: Measured) -> None:
    """Test the claims that hold for ε = 0, by gradients of the model without its ε."""
    claims = [c for c in clone.prover.claims if c.tier == "epsilon"]
    if not claims:
        return
    without = Point(without_epsilon(clone.graph), clone.values, point.inputs)
    moving = {name for c in claims for name in c.direction(without, torch.Generator())}
    grads = gradients(without.graph, clone.values, clone.draw, moving)
    note_evidence(claims, known, without, grads, measured)


def note_evidence(
    claims: Sequence[Claim], known: dict[int, ClaimIdentity], point: Point, grads: Gradients, measured: Measured
) -> None:
    for claim in claims:
        strength = claim_evidence(claim, point, grads)
        if strength is not None:
            own = known[id(claim)]
            measured.evidence[own] = max(strength, measured.evidence.get(own, 0.0))


def clone_of(source: Source, prover: Prover | None, laws: Catalogue, choice: CloneChoice = FIRST) -> Clone:
    """The narrow clone of a Hugging Face model; any other model as it is, with random parameters, if it is small.

    The prover is that of the model itself; for a model with a config it may be None.
    """
    n_parameters = sum(p.numel() for p in source.module.parameters())
    if source.config is None and n_parameters > AFFORDABLE:
        raise DeadweightError(f"{n_parameters:,} parameters, and no config from which to build a narrow clone")
    if source.config is None:
        assert prover is not None, "a model without a config is its own clone"
        module = randomise(source.module, choice.seed)
        small = replace(source, module=module, inputs=source.inputs.cast(torch.float64))
        graph, words = prover.graph, "the model itself, with random parameters"
        tensors = named_tensors(graph, module)
        same_buffers(module, source.module)  # as they were traced
        apart = None if PROBABILITIES in graph.nodes else program_error(graph, tensors, small, module)
        tensors = choice.scale_biases(graph, tensors)
        return Clone(graph, prover, *on_path(graph, tensors, drawer(graph, small), source), words, apart=apart)
    small = narrow(source, seed=choice.seed, vocabulary=choice.vocabulary)
    graph = canonical(trace(small.module, small.args, small.kwargs))
    apart = program_error(graph, {n: to_float64(t) for n, t in graph.tensors.items()}, small, small.module)
    graph = read_as_probabilities(graph) if prover and PROBABILITIES in prover.graph.nodes else graph
    own_prover = laws.search(graph)
    values = choice.scale_biases(graph, {n: to_float64(t) for n, t in graph.tensors.items()})
    words = small.notes[-1] if small.notes else "a narrow clone"
    return Clone(
        graph, own_prover, *on_path(graph, values, drawer(graph, small), small), words, roles(small.module), apart
    )


def another_clone(source: Source, prover: Prover | None, laws: Catalogue, choice: CloneChoice) -> Clone | None:
    """A clone with other parameters or a larger vocabulary; None if it does not run, or is too large to count."""
    try:
        clone = clone_of(source, prover, laws, choice)
        refuse_large_account(clone)
    except (DeadweightError, TraceError):
        return None
    return clone


def named_tensors(graph: Graph, module: torch.nn.Module) -> Values:
    """The module's parameters under the graph's node names; buffers and constants as they were traced."""
    values = {n: to_float64(t) for n, t in graph.tensors.items()}
    for node, name in graph.parameters.items():
        values[node] = to_float64(stored_part(graph, node, module.get_parameter(name)))
    return values


def to_float64(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def drawer(graph: Graph, source: Source) -> Draw:
    """A function from seeds to fresh inputs; integers that index a table range over all its rows."""
    ranges = index_ranges(graph) if source.config is None else {}

    def draw(seed: int) -> Values:
        generator = torch.Generator().manual_seed(seed)
        args, kwargs = source.draw(generator)
        bound = bind(graph, args, kwargs)
        for name, rows in ranges.items():
            bound[name] = torch.randint(0, rows, bound[name].shape, generator=generator)
        return bound

    return draw


def shortfall(clone: Clone, account: Account) -> Iterator[Unknown]:
    """Redundant dimensions that are unexplained, claims that do not hold, and a count that is not certain."""
    if not account.decided:
        why = "undecided: no clear gap between the singular values of redundant and of live dimensions"
        yield Unknown("*", None, why)
    missing = surplus(account)
    if missing:
        names = [clone.graph.parameters[n] for n, _ in account.shortfall if n in clone.graph.parameters][:4]
        why = f"unexplained: {missing} redundant dimensions of the narrow clone move {', '.join(names)}"
        yield Unknown(names[0] if names else "*", None, why)
    for claim, error in account.unsound:
        why = f"{claim.code} does not hold in a narrow clone (the outputs change by {error:.1e})"
        yield Unknown(clone.graph.parameters[claim.node], None, why)
