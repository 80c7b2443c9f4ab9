"""The group that leaves q·k unchanged, by exact linear algebra.

Between projection and product stand linear maps R_t that may depend on the position t. The pairs (X, Y) with
Xᵀ·M + M·Y = 0 for every M = R_iᵀ·R_j are the Lie algebra. Where one M₀ is invertible Y = −M₀⁻¹·Xᵀ·M₀, and X runs over
the matrices that commute with all N = (M·M₀⁻¹)ᵀ. The coordinates fall into components that no M links; like components
(those that a change of basis takes into each other) may be mixed, by Schur's lemma, with the matrices that commute with
one of them as entries. Numbers are elements of a finite field, so components, ranks and dimensions are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from deadweight.proof import field
from deadweight.proof.labels import fold, fresh
from deadweight.proof.linear_form import Form

POSITIONS = 16
WIDEST = 16  # coordinates that positions mix with each other: rotary mixes two
WIDEST_SUMMED = (
    4  # the same where random sums stand for the positions: each narrows a group of 4² dimensions until it fits
)


@dataclass(frozen=True)
class Products:
    """For one head: the coordinates of both sides, and M for several pairs of positions, where it is not 0."""

    left: Tensor  # coordinates of the queries' space, sorted
    right: Tensor
    entries: Int64[Tensor, "entries 2"]  # places among the coordinates of both sides
    values: Int64[Tensor, "pairs entries"]  # elements of the field
    summed: bool = False  # whether random sums stand for some positions

    def like(self, other: Products) -> bool:
        """Whether both heads meet through the same maps, each on its own coordinates."""
        if self.values is other.values:
            return True
        sizes = len(self.left) == len(other.left) and len(self.right) == len(other.right)
        return sizes and torch.equal(self.entries, other.entries) and torch.equal(self.values, other.values)

    def flipped(self) -> Products:
        return Products(self.right, self.left, self.entries.flip(1), self.values, self.summed)


def merged(products: Sequence[Products]) -> Products:
    """All the maps of several products of the same coordinates."""
    first = products[0]
    if len(products) == 1:
        return first
    codes = [p.entries[:, 0] * len(first.right) + p.entries[:, 1] for p in products]
    every = torch.cat(codes).unique()
    rows = []
    for p, code in zip(products, codes, strict=True):
        wide = torch.zeros(len(p.values), len(every), dtype=torch.int64)
        wide[:, torch.searchsorted(every, code)] = p.values
        rows.append(wide)
    entries = torch.stack([every // len(first.right), every % len(first.right)], 1)
    return Products(first.left, first.right, entries, torch.cat(rows), any(p.summed for p in products))


def head_products(left: Form, right: Form) -> list[Products]:
    """M for every head, from the forms of a product's two operands (… i r) and (… r j); like heads share one tensor."""
    a, b = Side.of(left, transpose=False), Side.of(right, transpose=True)
    shape = torch.broadcast_shapes(a.batch, b.batch)
    a, b = a.expanded(shape), b.expanded(shape)
    known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    heads: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Products]] = {}
    for place in first_of_each(a.names, b.names):
        rows, columns = a.coordinates_at(place), b.coordinates_at(place)
        pattern = (a.pattern(place, rows), b.pattern(place, columns))
        if pattern not in known:
            known[pattern] = meet(a, b, place, rows, columns)
        key = (tuple(rows.tolist()), tuple(columns.tolist()))
        heads.setdefault(key, []).append(Products(rows, columns, *known[pattern], a.summed or b.summed))
    return [merged(found) for found in heads.values()]


def first_of_each(*names: Tensor) -> list[int]:
    """Places with the first of each combination of names."""
    kinds = torch.unique(torch.stack(names, 1), dim=0, return_inverse=True)[1]
    return sorted({kind: place for place, kind in reversed(list(enumerate(kinds.tolist())))}.values())


@dataclass(frozen=True)
class Side:
    """One operand: (slots, places, positions, contracted) coordinates and factors, each position's vector with first
    factor 1: a number that multiplies a whole vector narrows no group."""

    batch: tuple[int, ...]
    coordinate: Tensor
    factor: field.Elements
    summed: bool = False

    @classmethod
    def of(cls, form: Form, *, transpose: bool) -> Side:
        coordinate = torch.stack(torch.broadcast_tensors(*[s.coordinate for s in form.slots]))
        factor = torch.stack(torch.broadcast_tensors(*[s.factor for s in form.slots]))
        if transpose:
            coordinate, factor = coordinate.transpose(-1, -2), factor.transpose(-1, -2)
        coordinate, factor, summed = some_positions(torch.where(factor == 0, 0, coordinate), normalised(factor))
        batch = tuple(coordinate.shape[1:-2])
        flat = (len(coordinate), -1, *coordinate.shape[-2:])
        return cls(batch, coordinate.reshape(flat), factor.reshape(flat), summed)

    def expanded(self, batch: tuple[int, ...]) -> Side:
        """For every place of a broadcast batch."""
        every = torch.arange(torch.Size(self.batch).numel()).reshape(self.batch).expand(batch).reshape(-1)
        return Side(batch, self.coordinate[:, every], self.factor[:, every], self.summed)

    @cached_property
    def names(self) -> Tensor:
        """A label for each place: equal where coordinates and factors are."""
        both = torch.stack([self.coordinate * 2 + 1, self.factor * 2 + 2]).movedim(2, 0).flatten(1)
        return fold(both, 1)

    def coordinates_at(self, place: int) -> Tensor:
        coordinate, factor = self.coordinate[:, place], self.factor[:, place]
        return coordinate[(coordinate != 0) & (factor != 0)].unique()

    def pattern(self, place: int, coordinates: Tensor) -> int:
        """What makes two heads alike: the same factors on coordinates numbered from their own first."""
        numbers = torch.searchsorted(coordinates, self.coordinate[:, place].contiguous())
        numbers = torch.where(self.coordinate[:, place] == 0, -1, numbers)
        return int(fold(torch.stack([numbers * 2 + 3, self.factor[:, place] * 2 + 2]).flatten(), 0))


def normalised(factor: field.Elements) -> field.Elements:
    """Every position's vector (slots, …, positions, contracted) divided by its first factor that is not 0."""
    vectors = factor.movedim(0, -1).flatten(-2)
    first = vectors.gather(-1, (vectors != 0).to(torch.int8).argmax(-1, keepdim=True))
    return field.times(factor, field.inverse(first).movedim(-1, 0).unsqueeze(-1))


def some_positions(coordinate: Tensor, factor: field.Elements) -> tuple[Tensor, field.Elements, bool]:
    """One position of every kind; of more kinds on the same coordinates as many random sums of them all, and whether.

    What a group must leave alone is linear in the map of each position: a turn that fails at one fails at a random sum.
    So each sum narrows the group until it is the one of all positions.
    """
    shape = factor.movedim(-2, 0).shape
    places, factors = (x.movedim(-2, 0).flatten(1) for x in (coordinate, factor))
    kinds = first_of_each(fold(places + 1, 1), fold(factors + 1, 1))
    alike: dict[int, list[int]] = {}
    for label, kind in zip(fold(places[kinds] + 1, 1).tolist(), kinds, strict=True):
        alike.setdefault(label, []).append(kind)
    few = {label: len(found) <= POSITIONS for label, found in alike.items()}
    picked = [factors[found] if few[label] else random_sums(factors[found]) for label, found in alike.items()]
    along = [places[found[:1]].expand(len(sums), -1) for found, sums in zip(alike.values(), picked, strict=True)]
    return (
        torch.cat(along).reshape(-1, *shape[1:]).movedim(0, -2),
        torch.cat(picked).reshape(-1, *shape[1:]).movedim(0, -2),
        not all(few.values()),
    )


def random_sums(factors: Int64[Tensor, "positions n"]) -> Int64[Tensor, "sums n"]:
    return field.matmul(field.generic(fresh((POSITIONS, len(factors)), "positions")), factors)


def meet(a: Side, b: Side, place: int, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_r aᵢᵣ·bⱼᵣ for all pairs of positions, as entries and values."""
    codes, values = [], []
    for x, s in zip(a.coordinate[:, place], a.factor[:, place], strict=True):
        for y, t in zip(b.coordinate[:, place], b.factor[:, place], strict=True):
            product = field.times(s[:, None, :], t[None, :, :])  # pairs i, j and what is contracted
            there = (x != 0)[:, None, :] & (y != 0)[None, :, :]
            row = torch.searchsorted(rows, x.contiguous()).clamp_max(len(rows) - 1)
            column = torch.searchsorted(columns, y.contiguous()).clamp_max(len(columns) - 1)
            codes.append((row[:, None, :] * len(columns) + column[None, :, :]).flatten(0, 1))
            values.append(torch.where(there, product, 0).flatten(0, 1))
    code, value = torch.cat(codes, 1), torch.cat(values, 1)
    every = code[value != 0].unique()
    where = torch.searchsorted(every, code).clamp_max(max(len(every) - 1, 0))
    found = torch.zeros(len(value), len(every), dtype=torch.int64)
    found = field.add_at(found, where, torch.where(every[where] == code, value, 0)) if len(every) else found
    kept = (found != 0).any(0)
    entries = torch.stack([every[kept] // len(columns), every[kept] % len(columns)], 1)
    return entries, found[:, kept].contiguous()


@dataclass(frozen=True)
class Part:
    """Like components of a head. Its group is all matrices of `count` by `count` entries, of `entry` dimensions each.

    With Z a matrix of such entries E, X has the blocks Tₖ·E·Tₗ⁻¹ on the left coordinates and Y the blocks −Wₗ·F·Wₖ⁻¹ on
    the right ones, where F stands for E there. One real vector is `grain` columns of entries.
    """

    left: Int64[Tensor, "count n"]  # places of each component among the coordinates of its side
    right: Int64[Tensor, "count n"]
    left_basis: Float64[Tensor, "count n n"]  # T
    right_basis: Float64[Tensor, "count n n"]  # W
    left_entries: Float64[Tensor, "entry n n"]  # E
    right_entries: Float64[Tensor, "entry n n"]  # F

    @property
    def count(self) -> int:
        return len(self.left)

    @property
    def entry(self) -> int:
        return len(self.left_entries)

    @property
    def grain(self) -> int:
        return max(1, self.left.shape[1] // self.entry)

    @property
    def dimension(self) -> int:
        return self.count * self.count * self.entry


@dataclass(frozen=True)
class Component:
    """Coordinates that some M links, directly or through others; N and M₀ on them."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    maps: Int64[Tensor, "pairs n n"]  # N
    first: Int64[Tensor, "n n"]  # M₀

    @property
    def key(self) -> tuple[int, ...]:
        """The same for like components: size and traces."""
        return (len(self.left), *field.total(torch.diagonal(self.maps, dim1=-2, dim2=-1), [-1]).tolist())


def commutant(products: Products) -> list[Part] | None:
    """The group of one head, part by part; None if no M is square and invertible, or too many coordinates are mixed."""
    components = components_of(products)
    if components is None:
        return None
    classes: dict[tuple[int, ...], list[Component]] = {}
    for component in components:
        classes.setdefault(component.key, []).append(component)
    return [part for alike in classes.values() for part in parts_of(alike)]


def components_of(products: Products) -> list[Component] | None:
    linked, widest = connected(products), WIDEST_SUMMED if products.summed else WIDEST
    if any(len(rows) != len(columns) or len(rows) > widest for rows, columns in linked):
        return None
    blocks = dense_blocks(products, linked)
    for pair in range(len(products.values)):
        inverses = [inverted(block[pair]) for block in blocks]
        if all(found is not None for found in inverses):
            return [
                Component(tuple(rows), tuple(columns), multiplied(block, back), block[pair])
                for (rows, columns), block, back in zip(linked, blocks, inverses, strict=True)
                if back is not None
            ]
    return None


def inverted(matrix: Tensor) -> Tensor | None:
    if len(matrix) == 1:
        return field.inverse(matrix) if bool(matrix) else None
    return field.inverted(matrix)


def multiplied(block: Tensor, matrix: Tensor) -> Tensor:
    """N = (M·M₀⁻¹)ᵀ for every M."""
    return field.times(block, matrix) if len(matrix) == 1 else field.matmul(block, matrix).mT.contiguous()


def dense_blocks(products: Products, linked: list[tuple[list[int], list[int]]]) -> list[Int64[Tensor, "pairs n n"]]:
    """M on every component."""
    home = {row: (k, i) for k, (rows, _) in enumerate(linked) for i, row in enumerate(rows)}
    across = {column: j for _, columns in linked for j, column in enumerate(columns)}
    pairs = len(products.values)
    blocks = [torch.zeros(pairs, len(rows), len(columns), dtype=torch.int64) for rows, columns in linked]
    for entry, (a, b) in enumerate(products.entries.tolist()):
        k, i = home[a]
        blocks[k][:, i, across[b]] = products.values[:, entry]
    return blocks


def connected(products: Products) -> list[tuple[list[int], list[int]]]:
    """Left and right places that entries link, directly or through others; a place without entries stands alone."""
    n = len(products.left)
    parent = list(range(n + len(products.right)))

    def top(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for a, b in products.entries.tolist():
        parent[top(a)] = top(n + b)
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for x in range(len(parent)):
        groups.setdefault(top(x), ([], []))[x >= n].append(x if x < n else x - n)
    return list(groups.values())


def parts_of(alike: list[Component]) -> Iterator[Part]:
    """One part for all components that a rational change of basis takes into the first; the others by themselves."""
    first, rest = alike[0], list[Component]()
    if len(first.left) == 1:
        yield from single_parts(alike)
        return
    entries = commuting(first.maps, first.maps)
    mirrored = [field.matmul(field.matmul(field.inverted_or_fail(first.first), e.T), first.first) for e in entries]
    e, f = field.as_real(entries), field.as_real(torch.stack(mirrored))
    if e is None or f is None:
        return  # undecided: a group that depends on the numbers drawn is none
    members, bases = [], []
    for component in alike:
        basis = change_of_basis(first, component, len(entries))
        if basis is None:
            rest.append(component)
        else:
            members.append(component)
            bases.append(basis)
    left, right = (torch.tensor([getattr(m, side) for m in members]) for side in ("left", "right"))
    yield Part(left, right, torch.stack([t for t, _ in bases]), torch.stack([w for _, w in bases]), e, f)
    if rest:
        yield from parts_of(rest)


def single_parts(alike: list[Component]) -> Iterator[Part]:
    """The same for components of one coordinate each, which are alike because N is: T = 1, W = M₀₁/M₀."""
    first = torch.cat([c.first.reshape(1) for c in alike])
    ratios = field.times(field.inverse(first), first[:1])
    real = [field.fraction(int(r)) for r in ratios]
    members = [(c, float(r)) for c, r in zip(alike, real, strict=True) if r is not None]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    left, right = (torch.tensor([getattr(c, side) for c, _ in members]) for side in ("left", "right"))
    scales = torch.tensor([r for _, r in members], dtype=torch.float64).reshape(-1, 1, 1)
    yield Part(left, right, one.expand_as(scales), scales, one, one)
    if rest := [c for c, r in zip(alike, real, strict=True) if r is None]:
        yield from single_parts(rest)


def change_of_basis(first: Component, other: Component, entry: int) -> tuple[Tensor, Tensor] | None:
    """T with N·T = T·N₁ for all pairs, and W = M₀⁻¹·T⁻ᵀ·M₀₁, as real matrices; None if there are none."""
    if other is first:
        eye = torch.eye(len(first.left), dtype=torch.float64)
        return eye, eye
    homs = commuting(other.maps, first.maps)
    if len(homs) != entry:
        return None
    for t in [*homs, field.total(homs, [0])]:
        back, inverse = field.inverted(t.T.contiguous()), field.inverted(other.first)
        if back is not None and inverse is not None:
            w = field.matmul(field.matmul(inverse, back), first.first)
            real = field.as_real(t), field.as_real(w)
            return None if real[0] is None or real[1] is None else (real[0], real[1])
    return None


def commuting(a: Int64[Tensor, "pairs n n"], b: Int64[Tensor, "pairs n n"]) -> Int64[Tensor, "found n n"]:
    """A basis of all T with A·T = T·B for every pair."""
    n = a.shape[-1]
    space = torch.eye(n * n, dtype=torch.int64)
    span = field.echelon(torch.cat([a.flatten(1), b.flatten(1)], 1))[0]  # what the pairs span: few matrices
    for row in span:
        x, y = row[: n * n].reshape(n, n), row[n * n :].reshape(n, n)
        found = space.reshape(-1, n, n)
        wrong = field.minus(field.matmul(x, found), field.matmul(found, y)).flatten(1)  # found × n²
        space = field.matmul(field.null_space(wrong.T.contiguous()), space)
        if not len(space):
            break
    return field.echelon(space)[0].reshape(-1, n, n)
