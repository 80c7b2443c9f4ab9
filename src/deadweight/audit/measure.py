"""Measuring: where evidence and account are taken, and what they say of the model that was asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from deadweight.audit.account import Account
from deadweight.audit.checker import replay
from deadweight.audit.count import best_account, surplus
from deadweight.audit.evidence import Draw, Gradients, claim_evidence, gradients
from deadweight.audit.finding import Completeness, Unknown
from deadweight.audit.matching import Identity, Role, identities, roles
from deadweight.audit.path import on_path
from deadweight.audit.same_function import CLOSE, program_error, same_buffers
from deadweight.claims.claim import Claim
from deadweight.claims.point import Point, Values
from deadweight.claims.shift_claim import ShiftClaim, element_wise
from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind, index_ranges
from deadweight.graph.canonical import PROBABILITIES, canonical, read_as_probabilities
from deadweight.graph.cores import without_epsilon
from deadweight.graph.evaluate import largest_difference
from deadweight.graph.node import Graph
from deadweight.graph.pieces import stored_part
from deadweight.graph.trace import TraceError, first_line, trace
from deadweight.laws.catalogue import Catalogue
from deadweight.proof.opsets import POSITIVELY_HOMOGENEOUS
from deadweight.search.prover import Prover
from deadweight.source.model import Source
from deadweight.source.narrow import narrow
from deadweight.source.randomise import randomise

T = TypeVar("T")
AFFORDABLE = 200_000_000  # parameters of a model without a narrow clone whose gradients are taken as it is
COUNTABLE = 20_000  # parameters: from here on an account takes too much memory and time
ZERO = {torch.float64: 1e-12, torch.float32: 1e-6}  # of a typical gradient: rounding leaves about 1e-15 and 1e-7


@dataclass(frozen=True)
class Clone:
    """A model small enough to measure, traced, with what was proved of it."""

    graph: Graph
    prover: Prover
    values: Values
    draw: Draw
    words: str
    roles: dict[str, Role] = field(default_factory=dict)  # of its parameters; none where the model is its own clone
    apart: float | None = None  # how far its program is from the module; None: not comparable


@dataclass
class Measured:
    """What was measured, and how claims about the model find their evidence."""

    identities: dict[int, Identity] = field(default_factory=dict)  # of the claims about the model
    tested: set[Identity] = field(default_factory=set)  # claims about the clone
    evidence: dict[Identity, float] = field(default_factory=dict)
    faults: dict[Identity, str] = field(default_factory=dict)  # proofs that do not replay on numbers
    unreplayed: dict[Identity, int] = field(default_factory=dict)  # steps whose labels are too many to replay
    completeness: Completeness | None = None
    unexplained: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()
    untested: str | None = None  # why no evidence could be taken

    def evidence_of(self, claim: Claim) -> float | None:
        return max(self.of_counterparts(claim, self.evidence), default=None)

    def refuses(self, claim: Claim) -> bool:
        return bool(self.of_counterparts(claim, self.faults))

    def unreplayed_steps(self, claim: Claim) -> int:
        return max(self.of_counterparts(claim, self.unreplayed), default=0)

    def of_counterparts(self, claim: Claim, known: dict[Identity, T]) -> list[T]:
        """What is known of the claim's counterpart; if that is not certain, of all that it might be."""
        own = self.identities.get(id(claim))
        if own is None:
            return []
        if own in self.tested:
            return [known[own]] if own in known else []
        return [value for other, value in known.items() if (other.law, other.role) == (own.law, own.role)]


def measure(source: Source, prover: Prover, laws: Catalogue, *, complete: bool) -> Measured:
    """Evidence for every claim where it is cheap, and the account where it is asked for."""
    measured = Measured()
    try:
        clone = clone_of(source, prover, laws)
    except (DeadweightError, TraceError) as error:
        if complete:
            raise DeadweightError(f"no account can be made: {error}") from error
        measured.untested = str(error)
        measured.notes = (f"no evidence was taken: {error}",)
        return measured
    known = {} if clone.prover is prover else roles(source.module)
    measured.identities = identities(prover.claims, prover.graph, known)
    try:
        take_evidence(source, clone, measured)
    except (RuntimeError, NotImplementedError) as error:  # an operation without a derivative or a float64 kernel
        measured.untested = first_line(error)
        measured.notes += (f"no evidence was taken: {measured.untested}",)
    if complete:
        refuse_large_account(clone)
        try:
            counted = best_account(clone, partial(another_clone, source, prover, laws), widen=source.config is not None)
        except (RuntimeError, NotImplementedError) as error:
            raise DeadweightError(f"no account can be made: {first_line(error)}") from error
        measured.completeness = counted.completeness
        measured.unexplained += tuple(shortfall(clone, counted))
    return measured


def refuse_large_account(clone: Clone) -> None:
    """The account solves for all parameters at once: time grows with the cube of their number."""
    count = sum(clone.values[n].numel() for n in clone.graph.parameters)
    if count > COUNTABLE:
        raise DeadweightError(
            f"no account can be made: {clone.words} has {count:,} parameters; expected at most {COUNTABLE:,}: "
            "build the model smaller"
        )


def take_evidence(source: Source, clone: Clone, measured: Measured) -> None:
    """Replay and test every claim of the clone; list the zeros that nobody claims."""
    if clone.apart is not None and clone.apart > CLOSE:
        refuse_all(clone, measured)
        return
    grads = gradients(clone.graph, clone.values, clone.draw)
    if not grads.draws:
        measured.notes += ("no gradients were taken: they are not finite for any inputs drawn",)
    test_claims(clone, grads, measured)
    measured.unexplained += tuple(unexplained(source, clone, grads))


def refuse_all(clone: Clone, measured: Measured) -> None:
    """A program that is another function than the model's proves nothing about the model."""
    known = identities(clone.prover.claims, clone.graph, clone.roles)
    measured.tested.update(known.values())
    why = f"the traced program computes something else than the model (its outputs are off by {clone.apart:.1e})"
    measured.faults.update(dict.fromkeys(known.values(), why))
    measured.unexplained += (Unknown("*", None, f"{why}: no finding is reported; please report the model"),)


def test_claims(clone: Clone, grads: Gradients, measured: Measured) -> None:
    """Replay every claim on numbers, and ask the gradients."""
    point = Point(clone.graph, clone.values, clone.draw(2))
    known = identities(clone.prover.claims, clone.graph, clone.roles)
    measured.tested.update(known.values())
    replayed = replay(clone.prover.claims, point)
    for place, claim in enumerate(clone.prover.claims):
        if place in replayed.faults:
            fault = measured.faults[known[id(claim)]] = replayed.faults[place]
            why = f"{claim.code}: the proof does not replay: {fault}"
            measured.unexplained += (Unknown(clone.graph.parameters[claim.node], None, why),)
        if place in replayed.skipped:
            measured.unreplayed[known[id(claim)]] = replayed.skipped[place]
    without = Point(without_epsilon(clone.graph), clone.values, point.inputs)
    without_grads = gradients(without.graph, clone.values, clone.draw) if any_epsilon(clone) else grads
    for claim in clone.prover.claims:
        seen = (without, without_grads) if claim.tier == "epsilon" else (point, grads)
        strength = claim_evidence(claim, *seen)
        if strength is not None:
            own = known[id(claim)]
            measured.evidence[own] = max(strength, measured.evidence.get(own, 0.0))


def any_epsilon(clone: Clone) -> bool:
    return any(c.tier == "epsilon" for c in clone.prover.claims)


def clone_of(
    source: Source, prover: Prover | None, laws: Catalogue, *, seed: int = 0, vocabulary: int | None = None
) -> Clone:
    """The narrow clone of a Hugging Face model; any other model as it is, with random parameters, if it is small.

    The prover is that of the model itself; a model with a config needs none.
    """
    n_parameters = sum(p.numel() for p in source.module.parameters())
    if source.config is None and n_parameters > AFFORDABLE:
        raise DeadweightError(f"{n_parameters:,} parameters and no config to make a narrow clone from")
    if source.config is None:
        assert prover is not None, "a model without a config is its own clone"
        module = randomise(source.module, seed)
        small = replace(source, module=module, inputs=source.inputs.cast(torch.float64))
        graph, words = prover.graph, "the model itself, with random parameters"
        tensors = named_tensors(graph, module)
        same_buffers(module, source.module)  # as they were traced
        apart = None if PROBABILITIES in graph.nodes else program_error(graph, tensors, small, module)
        return Clone(graph, prover, *on_path(graph, tensors, drawer(graph, small), source), words, apart=apart)
    small = narrow(source, seed=seed, vocabulary=vocabulary)
    graph = canonical(trace(small.module, small.args, small.kwargs))
    apart = program_error(graph, {n: widened(t) for n, t in graph.tensors.items()}, small, small.module)
    graph = read_as_probabilities(graph) if prover and PROBABILITIES in prover.graph.nodes else graph
    found = laws.search(graph)
    values = {n: widened(t) for n, t in graph.tensors.items()}
    words = small.notes[-1] if small.notes else "a narrow clone"
    return Clone(graph, found, *on_path(graph, values, drawer(graph, small), small), words, roles(small.module), apart)


def another_clone(source: Source, prover: Prover | None, laws: Catalogue, **choice: int) -> Clone | None:
    """A clone of other parameters or more words; None where it does not run, or is too large to be counted."""
    try:
        clone = clone_of(source, prover, laws, **choice)
        refuse_large_account(clone)
    except (DeadweightError, TraceError):
        return None
    return clone


def named_tensors(graph: Graph, module: torch.nn.Module) -> Values:
    """The module's parameters under the graph's node names; buffers and constants as they were traced."""
    values = {n: widened(t) for n, t in graph.tensors.items()}
    for node, name in graph.parameters.items():
        values[node] = widened(stored_part(graph, node, module.get_parameter(name)))
    return values


def widened(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def drawer(graph: Graph, source: Source) -> Draw:
    """Fresh inputs by seed; integers that index a table range over all its rows."""
    ranges = index_ranges(graph) if source.config is None else {}

    def draw(seed: int) -> Values:
        generator = torch.Generator().manual_seed(seed)
        args, kwargs = source.draw(generator)
        bound = bind(graph, args, kwargs)
        for name, rows in ranges.items():
            bound[name] = torch.randint(0, rows, bound[name].shape, generator=generator)
        return bound

    return draw


def unexplained(source: Source, clone: Clone, grads: Gradients) -> Iterator[Unknown]:
    """Zero gradients of biases, gains and weights that no claim covers. Tables are left out: rows may not be drawn."""
    candidates: Values = {}
    for name, zero in grads.zero_elements().items():
        if any(r.op == "aten.embedding" for r in clone.graph.users[name]):
            continue
        for claim in clone.prover.claims:
            if claim.node == name and isinstance(claim, ShiftClaim) and each_dead(claim):
                zero = zero & ~(claim.groups != 0).expand(zero.shape)
        if bool(zero.any()) and not unit_off(clone.graph, zero):
            candidates[name] = zero
    for name in staying(clone, candidates):
        count = int(candidates[name].sum())
        why = f"unexplained: {count} of {candidates[name].numel()} elements have no gradient in a narrow clone"
        yield Unknown(clone.graph.parameters[name], None, why)


def each_dead(claim: ShiftClaim) -> bool:
    """Whether the claim is about single elements: that their mean is dead does not explain why one of them is."""
    return claim.verdict == "dead" and claim.lost is None and element_wise(claim)


def staying(clone: Clone, candidates: Values) -> list[str]:
    """Parameters whose marked elements can be moved by a lot without a change: no gradient is not yet no effect.

    All are moved at once first; only where that changes something is each moved by itself (not some of them: a unit
    that one of them turns off hides what the others do), and then only what reads it is computed again.
    """
    if not candidates:
        return []
    point = Point(clone.graph, clone.values, clone.draw(5))

    def stay(names: Iterable[str]) -> bool:
        generator = torch.Generator().manual_seed(7)
        moved = {}
        for name in names:  # by amounts that differ: moved alike, what only chooses would choose alike
            amounts = torch.randn(candidates[name].shape, generator=generator, dtype=torch.float64)
            moved[name] = clone.values[name] + 3.0 * amounts * candidates[name]
        return largest_difference(point.outputs, point.at(moved).outputs) < 1e-12

    if stay(candidates):
        return list(candidates)
    assert point.nodes  # known from here on
    return [name for name in candidates if stay([name])]


def unit_off(graph: Graph, zero: Tensor) -> bool:
    """Hidden units that were off, or experts that were not chosen, for all inputs drawn: some rows, not all."""
    gates = POSITIVELY_HOMOGENEOUS | {"aten.topk", "aten.hardtanh", "aten.clamp", "aten.relu6", "aten.hardswish"}
    return any(n.op in gates for n in graph.nodes.values()) and not bool(zero.all())


def shortfall(clone: Clone, counted: Account) -> Iterator[Unknown]:
    """Name what is redundant and unexplained, what is claimed and does not hold, and a count that is not certain."""
    if not counted.decided:
        why = "undecided: no clear gap between the singular values of redundant and of live dimensions"
        yield Unknown("*", None, why)
    missing = surplus(counted)
    if missing:
        names = [clone.graph.parameters[n] for n, _ in counted.shortfall if n in clone.graph.parameters][:4]
        why = f"unexplained: {missing} redundant dimensions of the narrow clone move {', '.join(names)}"
        yield Unknown(names[0] if names else "*", None, why)
    for claim, error in counted.unsound:
        why = f"{claim.code} does not hold in a narrow clone (off by {error:.1e})"
        yield Unknown(clone.graph.parameters[claim.node], None, why)


def own_precision(module: torch.nn.Module) -> torch.dtype:
    """Of its parameters: a clone is in float32 where the model's code does not run in float64."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)


def untraced_evidence(source: Source) -> Iterator[Unknown]:
    """Without a graph: zero gradients of the module itself, in float64 unless its clone runs in float32 alone."""
    try:
        small = source if source.config is None else narrow(source)
    except DeadweightError as error:
        yield Unknown("*", None, f"no evidence either: {error}")
        return
    dtype = torch.float64 if small is source else own_precision(small.module)
    module = randomise(small.module, 0).to(dtype)
    totals: dict[str, Tensor] = {}
    for seed in range(4):
        args, kwargs = small.inputs.cast(dtype).draw(torch.Generator().manual_seed(seed))
        module.zero_grad()
        try:
            out = module(*args, **kwargs)
        except Exception as error:
            raise DeadweightError(
                f"{source.name} does not run on its example inputs ({first_line(error)}); "
                "expected inputs that its forward takes"
            ) from error
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if not leaves:
            raise DeadweightError(f"{source.name} returns no tensor that depends on its parameters")
        try:
            torch.stack([(t * torch.randn_like(t)).sum().real for t in leaves]).sum().backward()
        except Exception as error:  # noqa: BLE001 - operations without a derivative
            yield Unknown("*", None, f"no evidence either: {first_line(error)}")
            return
        for name, p in module.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad.abs()
            totals[name] = torch.maximum(totals.get(name, torch.zeros_like(grad)), grad)
    typical = torch.cat([t.reshape(-1) for t in totals.values()]).mean()
    if not bool(torch.isfinite(typical)):
        yield Unknown("*", None, "no evidence either: the gradients are not finite")
    for name, total in totals.items():
        count = int((total < ZERO[dtype] * typical).sum())
        if count and total.ndim <= 1:
            yield Unknown(name, None, f"{count} of {total.numel()} elements have no gradient; not proved")
