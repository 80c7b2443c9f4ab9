"""DW005 mean before LayerNorm: what a parameter writes alike to all channels of a stream that only LayerNorm reads.

Behind a per-channel scale λ (LayerScale) the dead direction is 1/λ instead of all ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deadweight.claims.claim import Claim, Title, noted
from deadweight.claims.shift_claim import ShiftClaim, channel_axis, element_wise
from deadweight.graph.node import Graph, Node, Ref, is_vector
from deadweight.laws.law import Law, Rewriting, Search
from deadweight.proof.operation_groups import SHAPE, names
from deadweight.proof.readers import peel
from deadweight.proof.shift import Outcome
from deadweight.rewrite.known_facts import SettledFacts
from deadweight.rewrite.rewrite import NotDone, Rewrite, Tensors, chosen_place
from deadweight.rewrite.shifts import ShiftRewrite, parameters_read, rewrite_shift
from deadweight.save.facts import Fact, ZeroPlaces, module_of
from deadweight.search.prover import Prover, first_uses
from deadweight.search.shifts import (
    all_claimed,
    common,
    each_element,
    make_claim,
    shift_claims,
    tied_groups,
    vector_claim,
)

TITLE = Title("DW005", "mean-before-layernorm")
LINEAR_IN_SHIFTS = SHAPE | names("add sub mul div neg matmul mean sum where masked_fill dropout")
LARGEST_WEIGHT = 1 << 26  # elements that are numbered one by one, in 32 bits: 256 MiB


def find(prover: Prover) -> Iterator[ShiftClaim]:
    for node in prover.parameters():
        if all_claimed(prover, node):
            continue
        single = list(each_element(prover, TITLE, node, dies_in_layernorm)) if is_vector(node) else []
        parts = single or list(line_means(prover, node)) or list(weight_line_means(prover, node))
        claims = parts or list(common(prover, TITLE, node, dies_in_layernorm))
        yield from claims or behind_scale(prover, node)


def dies_in_layernorm(prover: Prover, node: Node, outcome: Outcome) -> bool:
    """The shift died in a LayerNorm, or where a value's own mean is subtracted from it: over channels that stand first.

    What a convolution writes is normed so.
    """
    ends = [prover.graph.nodes[s.node] for s in outcome.steps if s.value is None]
    return not outcome.absorbed and any(end.op == "core.layer" or less_own_mean(prover.graph, end) for end in ends)


def less_own_mean(graph: Graph, node: Node) -> bool:
    """Whether a node is x − mean(x)."""
    if node.op != "aten.sub" or node.kwargs or not all(isinstance(a, Ref) for a in node.args):
        return False
    mean = graph.node(node.args[1])
    return mean.op == "aten.mean" and mean.args[0] == node.args[0]


def line_means(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """LayerNorms over parts of a vector, head by head say: one dead mean for each part.

    A fused bias has several: that of the queries' norm, and that of the keys'.
    """
    if not is_vector(node):
        return
    taken = torch.zeros(node.shape, dtype=torch.bool)
    for _, outcome in prover.blocked.get(node.name, []):
        number = lines_of(outcome, torch.Size(node.shape).numel())
        if number is None:
            continue
        groups = number.reshape(node.shape)
        proved = prover.walk(node.name, groups)
        if proved.proved and not bool((taken & (groups != 0)).any()):
            taken |= groups != 0
            yield vector_claim(prover, TITLE, node, groups, proved)


def lines_of(outcome: Outcome, count: int) -> Tensor | None:
    """For each of `count` numbered channels the line of the LayerNorm that stopped a walk: its least channel, or 0."""
    lines = outcome.lines
    if lines is None or bool((lines < 0).any()):
        return None
    number = torch.zeros(count + 1, dtype=torch.int64)
    for row in lines.reshape(-1, lines.shape[-1]).unique(dim=0):
        number[row.long()] = int(row[row > 0].min()) if bool((row > 0).any()) else 0
    return number[1:]


def weight_line_means(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """The same of a weight: what it writes alike to all channels of a line, one dead mean for each line and column.

    The walk begins at what the weight writes, where each position moves by an amount of its own.
    """
    graph, product = prover.graph, product_of(prover.graph, node)
    taken_already = any(not claim.unread for claim in shift_claims(prover, node))
    if product is None or taken_already or prover.surely_alive(node.name):
        return
    rows, columns = graph.nodes[product.args[1].name].shape
    if rows * columns > LARGEST_WEIGHT or not may_reach_lines(graph, product):
        return
    channels = torch.arange(1, rows + 1)
    uses = first_uses(graph, product, channels.expand(product.shape)).items()
    parts = [elements for use, elements in uses if graph.nodes[use.partition(":")[0]].op == "core.layer"]
    taken = torch.zeros(rows, dtype=torch.bool)
    for elements in parts or [channels]:
        reached = torch.where(torch.isin(channels, elements), channels, 0).expand(product.shape)
        number = lines_of(prover.walk(product.name, reached, fixed=False), rows)
        if number is None or len(number.unique()) == 1 or bool((taken & (number != 0)).any()):
            continue  # one line for all channels is what `common` looks for
        places = torch.arange(torch.Size(product.shape[:-1]).numel()).reshape(*product.shape[:-1], 1)
        moved = torch.where(number == 0, 0, number + places * (rows + 1))
        outcome = prover.walk(product.name, moved, fixed=False)
        if outcome.proved and dies_in_layernorm(prover, node, outcome):
            taken |= number != 0
            line = number.to(torch.int32)[:, None]
            groups = torch.where(line == 0, 0, line * columns + torch.arange(columns, dtype=torch.int32))
            upright = product.args[1] == Ref(node.name)
            yield make_claim(prover, TITLE, node, groups if upright else groups.t().contiguous(), outcome)


def may_reach_lines(graph: Graph, product: Node) -> bool:
    """Whether a way that a shift may take leads to a LayerNorm that is narrower than what the weight writes."""
    stack, seen = [product.name], {product.name}
    while stack:
        for reader in graph.users[stack.pop()]:
            if reader.op == "core.layer" and reader.shape[-1] < product.shape[-1]:
                return True
            if reader.op in LINEAR_IN_SHIFTS and reader.name not in seen:
                seen.add(reader.name)
                stack.append(reader.name)
    return False


def product_of(graph: Graph, node: Node) -> Node | None:
    """The linear map that alone reads a parameter, perhaps transposed, as its weight."""
    current = node
    for _ in range(2):
        readers = graph.users[current.name]
        if len(readers) != 1 or not is_weight_of(readers[0], current):
            return None
        if readers[0].op == "linear":
            return readers[0] if readers[0].args[0] != Ref(current.name) else None
        current = readers[0]
    return None


def behind_scale(prover: Prover, node: Node) -> Iterator[ShiftClaim]:
    """The same behind a per-channel scale: the weighted motion is uniform where the scale has been applied."""
    scaled = scale_after(prover.graph, node)
    if scaled is None or not writes_channels(prover.graph, node, scaled[0].shape[-1]):
        return
    product, scale = scaled
    places = torch.Size(product.shape[:-1]).numel()
    uniform = torch.arange(1, places + 1).reshape(*product.shape[:-1], 1).expand(product.shape)
    vector = len([n for n in node.shape if n > 1]) == 1
    moved = torch.ones(product.shape, dtype=torch.int64) if vector else uniform
    outcome = prover.walk(product.name, moved, fixed=vector)
    groups = next(tied_groups(prover.graph, node), None)
    if outcome.proved and groups is not None and dies_in_layernorm(prover, node, outcome):
        claim = make_claim(prover, TITLE, node, groups, outcome)
        why = f"the parameter moves along 1/{scale}, so that behind this factor all channels move alike"
        steps = (replace(claim.steps[0], rule=why), *claim.steps[1:])
        note = "the dead direction is 1/λ, λ being the scale behind it"
        yield replace(claim, profile=scale, steps=steps, note=noted(claim, note))


def scale_after(graph: Graph, node: Node) -> tuple[Node, str] | None:
    """The product with a per-channel parameter that everything this parameter writes goes through."""
    current = node
    for _ in range(6):
        users = graph.users[current.name]
        if len(users) != 1:
            return None
        reader = users[0]
        if reader.op == "aten.mul":
            inner, scale = peel(graph, reader.name, "aten.mul")
            return (reader, scale) if scale is not None and inner == current.name else None
        if not (is_weight_of(reader, current) or keeps_channels(reader, current) or adds_bias(reader, current, graph)):
            return None
        current = reader
    return None


def writes_channels(graph: Graph, node: Node, width: int) -> bool:
    """Whether a parameter has one element, or one row, for each channel: only then can it move along 1/λ."""
    return bool(node.shape) and node.shape[channel_axis(graph, node)] == width


def is_weight_of(reader: Node, current: Node) -> bool:
    """Whether a parameter, perhaps transposed, is the weight of a linear map; what the map reads is no weight."""
    if reader.op == "linear":
        return current.op in ("parameter", "aten.t") and reader.args[1] == Ref(current.name)
    return reader.op == "aten.t" and current.op == "parameter"


def keeps_channels(reader: Node, current: Node) -> bool:
    return reader.op == "aten.reshape" and reader.shape[-1:] == current.shape[-1:]


def adds_bias(reader: Node, current: Node, graph: Graph) -> bool:
    if reader.op != "aten.add":
        return False
    others = [a.name for a in reader.args if isinstance(a, Ref) and a.name != current.name]
    return len(others) == 1 and (graph.nodes[others[0]].op in ("parameter", "linear"))


@dataclass(frozen=True, kw_only=True)
class Centre(ShiftRewrite):
    """Subtract one channel from all of a line: nobody sees what is common to them, and that channel becomes zero."""

    @property
    def axis_and_lines(self) -> tuple[int, Tensor]:
        """The axis of the channels, and the line of each: the elements of a line's channels move together."""
        groups = self.claim.groups.expand(self.graph.nodes[self.claim.node].shape)
        for axis in range(groups.ndim):
            lines = lines_along(groups, axis)
            if lines is not None:
                return axis, lines
        raise NotDone("the elements that move together do not lie along one axis")

    @property
    def nodes(self) -> tuple[str, ...]:
        profile = self.claim.profile
        if profile is None or profile in self.graph.parameters:
            return (self.claim.node, *([profile] if profile else []))
        return (self.claim.node, *sorted(parameters_read(self.graph, profile, set())))

    def apply(self, tensors: Tensors, known: SettledFacts) -> list[Fact]:
        if known.is_folded(self.target):
            raise NotDone("it is already gone")
        axis, lines = self.axis_and_lines
        if not torch.equal(self.moving(), along(lines != 0, axis, self.moving())):
            raise NotDone("only some rows of it are read, and only of these the mean is dead")
        if self.claim.profile is not None:
            profile = self.lookup(tensors).of(self.claim.profile)
            if not bool((profile == 1).all()):
                raise NotDone("a factor per channel stands behind it that does not fold")
        weight, centred = tensors[self.target], known.centred_channels(module_of(self.target))
        places = []
        for line in range(1, int(lines.max()) + 1):
            inside = lines == line
            taken = [channel for channel in centred if bool(inside[channel])]
            places.append(taken[0] if taken else chosen_place(weight, axis, inside))
            weight = torch.where(along(inside, axis, weight), weight - weight.narrow(axis, places[-1], 1), weight)
        tensors[self.target] = weight
        return [ZeroPlaces(self.target, axis, tuple(sorted(places)), because="centred")]


def lines_along(groups: Tensor, axis: int) -> Tensor | None:
    """The line (from 1; 0: still) of each index of an axis, if a line's elements move together at each other index.

    Elements that stay at some other index only count as moving: whoever centres them must look.
    """
    rows = groups.movedim(axis, 0).reshape(groups.shape[axis], -1)
    whole = rows[:, (rows != 0).any(0)]
    if not whole.shape[1]:
        return None
    numbers, lines = whole[:, 0].unique(return_inverse=True)
    lines = lines + int(numbers[0] != 0)
    first = torch.stack([(lines == line).nonzero()[0, 0] for line in range(1, int(lines.max()) + 1)])
    leaders = whole[first]
    alike = torch.equal(whole, torch.where(lines[:, None] == 0, 0, leaders[(lines - 1).clamp(min=0)]))
    return lines if alike and len(leaders.unique()) == leaders.numel() < int((whole != 0).sum()) else None


def along(lines: Tensor, axis: int, like: Tensor) -> Tensor:
    """A number for each index of an axis, in the shape of a tensor."""
    return lines.reshape([-1 if a == axis else 1 for a in range(like.ndim)]).expand(like.shape)


def make_rewrite(graph: Graph, claim: Claim) -> Rewrite:
    assert isinstance(claim, ShiftClaim)
    if element_wise(claim) and is_vector(graph.nodes[claim.node]):
        return rewrite_shift(graph, claim)
    rewrite = Centre(graph=graph, claim=claim)
    _ = rewrite.axis_and_lines  # raises where there is none
    return rewrite


LAW = Law(
    title=TITLE,
    fix="use RMSNorm, which has no mean to lose; or leave it: one number per row",
    searches=(Search(60, find),),
    rewriting=Rewriting(
        order=90, make=make_rewrite, slim_only="in the stock layout the emptied channel would still be stored"
    ),
)
