"""Measuring: where evidence and account are taken, and what they say of the model that was asked about."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deadweight.audit.account import Account, account
from deadweight.audit.checker import replay
from deadweight.audit.evidence import Draw, Gradients, claim_evidence, gradients
from deadweight.audit.finding import Completeness, Unknown
from deadweight.audit.path import on_path
from deadweight.errors import DeadweightError
from deadweight.graph.bind import bind, index_ranges
from deadweight.graph.canonical import PROBABILITIES, canonical, read_as_probabilities
from deadweight.graph.cores import without_epsilon
from deadweight.graph.evaluate import evaluate, largest_difference
from deadweight.graph.node import Graph
from deadweight.graph.pieces import stored_part
from deadweight.graph.trace import TraceError, first_line, trace
from deadweight.laws.catalogue import search
from deadweight.laws.claim import Claim
from deadweight.laws.point import Point, Values
from deadweight.laws.prover import Prover
from deadweight.laws.shift_claim import ShiftClaim
from deadweight.laws.shifts import element_wise
from deadweight.proof.opsets import POSITIVELY_HOMOGENEOUS
from deadweight.source.model import Source
from deadweight.source.narrow import narrow
from deadweight.source.randomise import randomise

AFFORDABLE = 200_000_000  # parameters of a model without a narrow clone whose gradients are taken as it is
MORE_WORDS = 41  # a first layer that sees single tokens needs more points than the narrow vocabulary has
COUNTABLE = 20_000  # parameters: from here on an account takes too much memory and time
PATIENCE = 90.0  # seconds, after which no further draw is begun
ZERO = {torch.float64: 1e-12, torch.float32: 1e-6}  # of a typical gradient: rounding leaves about 1e-15 and 1e-7
TRIES = 6  # draws of parameters for ReLU models: units that are never or always on add to the count


@dataclass(frozen=True)
class Clone:
    """A model small enough to measure, traced, with what was proved of it."""

    graph: Graph
    prover: Prover
    values: Values
    draw: Draw
    words: str


@dataclass
class Measured:
    """What was measured, and how claims about the model find their evidence."""

    graph: Graph
    by_key: dict[tuple[str, str, int], float] = field(default_factory=dict)
    faults: dict[tuple[str, str, int], str] = field(default_factory=dict)  # proofs that do not replay on numbers
    completeness: Completeness | None = None
    unexplained: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()
    untested: str | None = None  # why no evidence could be taken

    def evidence_of(self, claim: Claim) -> float | None:
        return self.by_key.get(key_of(self.graph, claim), self.by_key.get((*key_of(self.graph, claim)[:2], -1)))

    def refuses(self, claim: Claim) -> bool:
        return key_of(self.graph, claim) in self.faults


def key_of(graph: Graph, claim: Claim) -> tuple[str, str, int]:
    """The law, the parameter whatever its layer, and which part of the parameter in order."""
    return claim.code, re.sub(r"\.\d+\.", ".N.", graph.parameters[claim.node]), part_of(graph, claim)


def part_of(graph: Graph, claim: Claim) -> int:
    """Where in a fused parameter the claim begins, in twelfths: the same in a narrow clone."""
    first = 0 if claim.index is None or not len(claim.index) else int(claim.index[0])
    shape, axis, start = graph.nodes[claim.node].shape, claim.axis, 0
    size = shape[axis] if shape else 1
    if claim.node in graph.pieces:
        piece = graph.pieces[claim.node]
        start = sum(a for a, _ in piece.ranges)  # tells the pieces of one parameter apart
        size = max(b for _, b in piece.ranges) if start else size
    return int(12 * (start + first) / size)


def measure(source: Source, prover: Prover, *, complete: bool) -> Measured:
    """Evidence for every claim where it is cheap, and the account where it is asked for."""
    measured = Measured(prover.graph)
    try:
        clone = clone_of(source, prover)
    except (DeadweightError, TraceError) as error:
        if complete:
            raise DeadweightError(f"no account can be made: {error}") from error
        measured.untested = str(error)
        measured.notes = (f"no evidence was taken: {error}",)
        return measured
    try:
        take_evidence(source, clone, measured)
    except (RuntimeError, NotImplementedError) as error:  # an operation without a derivative or a float64 kernel
        measured.untested = first_line(error)
        measured.notes += (f"no evidence was taken: {measured.untested}",)
    if complete:
        refuse_large_account(clone)
        try:
            counted = best_account(source, prover, clone)
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
    grads = gradients(clone.graph, clone.values, clone.draw)
    if not grads.draws:
        measured.notes += ("no gradients were taken: they are not finite for any inputs drawn",)
    point = Point(clone.graph, clone.values, clone.draw(2))
    for place, fault in replay(clone.prover.claims, point).items():
        claim = clone.prover.claims[place]
        measured.faults[key_of(clone.graph, claim)] = fault
        why = f"{claim.code}: the proof does not replay: {fault}"
        measured.unexplained += (Unknown(clone.graph.parameters[claim.node], None, why),)
    without = Point(without_epsilon(clone.graph), clone.values, point.inputs)
    without_grads = gradients(without.graph, clone.values, clone.draw) if any_epsilon(clone) else grads
    for claim in clone.prover.claims:
        seen = (without, without_grads) if claim.tier == "epsilon" else (point, grads)
        found = claim_evidence(claim, *seen)
        if found is not None:
            key = key_of(clone.graph, claim)
            for alias in (key, (*key[:2], -1)):
                measured.by_key[alias] = max(found, measured.by_key.get(alias, 0.0))
    measured.unexplained += tuple(unexplained(source, clone, grads))


def any_epsilon(clone: Clone) -> bool:
    return any(c.tier == "epsilon" for c in clone.prover.claims)


def clone_of(source: Source, prover: Prover, *, seed: int = 0, vocabulary: int = 11) -> Clone:
    """The narrow clone of a Hugging Face model; any other model as it is, with random parameters, if it is small."""
    n_parameters = sum(p.numel() for p in source.module.parameters())
    if source.config is None and n_parameters > AFFORDABLE:
        raise DeadweightError(f"{n_parameters:,} parameters and no config to make a narrow clone from")
    if source.config is None:
        module = randomise(source.module, seed)
        small = replace(source, module=module, inputs=source.inputs.cast(torch.float64))
        graph, words = prover.graph, "the model itself, with random parameters"
        tensors = named_tensors(graph, module)
        return Clone(graph, prover, *on_path(graph, tensors, drawer(graph, small), source), words)
    small = narrow(source, seed=seed, vocabulary=vocabulary)
    graph = canonical(trace(small.module, small.args, small.kwargs))
    graph = read_as_probabilities(graph) if PROBABILITIES in prover.graph.nodes else graph
    found = search(graph)
    values = {n: widened(t) for n, t in graph.tensors.items()}
    words = small.notes[-1] if small.notes else "a narrow clone"
    return Clone(graph, found, *on_path(graph, values, drawer(graph, small), small), words)


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

    All are moved at once first; only where that changes something is each moved by itself.
    """
    if not candidates:
        return []
    inputs = clone.draw(5)
    before = evaluate(clone.graph, clone.values, inputs)

    def stay(names: Iterable[str]) -> bool:
        generator = torch.Generator().manual_seed(7)
        moved = {}
        for name in names:  # by amounts that differ: moved alike, what only chooses would choose alike
            amounts = torch.randn(candidates[name].shape, generator=generator, dtype=torch.float64)
            moved[name] = clone.values[name] + 3.0 * amounts * candidates[name]
        return largest_difference(before, evaluate(clone.graph, {**clone.values, **moved}, inputs)) < 1e-12

    return list(candidates) if stay(candidates) else [name for name in candidates if stay([name])]


def unit_off(graph: Graph, zero: Tensor) -> bool:
    """Hidden units that were off, or experts that were not chosen, for all inputs drawn: some rows, not all."""
    gates = POSITIVELY_HOMOGENEOUS | {"aten.topk", "aten.hardtanh", "aten.clamp", "aten.relu6", "aten.hardswish"}
    return any(n.op in gates for n in graph.nodes.values()) and not bool(zero.all())


def best_account(source: Source, prover: Prover, clone: Clone) -> Account:
    """The smallest nullity over several draws: a draw can only add to what is redundant for all parameters."""
    start = time.monotonic()
    best = account(clone.graph, clone.values, clone.draw, clone.prover.claims)
    words = clone.words
    for attempt in attempts(source, clone):
        if time.monotonic() - start > PATIENCE:
            break
        if best.completeness.measured == best.completeness.explained and not best.unsound and best.decided:
            break
        other = clone_of(source, prover, **attempt)
        found = account(other.graph, other.values, other.draw, other.prover.claims)
        if (not found.decided, surplus(found)) < (not best.decided, surplus(best)):
            best, words = found, other.words
    return replace(best, completeness=replace(best.completeness, clone=words))


def surplus(found: Account) -> int:
    return found.completeness.measured - found.completeness.explained


def attempts(source: Source, clone: Clone) -> Iterator[dict[str, Any]]:
    if source.config is not None:
        yield {"vocabulary": MORE_WORDS}
    if any(n.op in POSITIVELY_HOMOGENEOUS for n in clone.graph.nodes.values()):
        for seed in range(1, TRIES):
            yield {"seed": seed}


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
        leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
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
