"""The group that leaves q·k unchanged: a null space.

Between projection and product stand linear maps R_t that may depend on the position t. The pairs (X, Y) with
Xᵀ·M + M·Y = 0 for every M = R_iᵀ·R_j are the Lie algebra. Where one M is invertible Y follows from X, and X runs over
the matrices that commute with all N = M·M₀⁻¹: block by block, by Schur's lemma.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from deadweight.proof.form import Form, Slot

POSITIONS = 12
TOLERANCE = 1e-8  # of numbers of order one, in float64
WIDEST = 16  # coordinates that positions mix with each other: rotary mixes two


@dataclass(frozen=True)
class Products:
    """For one head: the coordinates of both sides, and M for several pairs of positions."""

    left: Tensor  # coordinates of the queries' space, sorted
    right: Tensor
    matrices: Float64[Tensor, "pairs left right"]


def head_products(left: Form, right: Form) -> list[Products]:
    """M for every head, from the forms of a product's two operands (… i r) and (… r j); like heads share one tensor."""
    left, right = some_positions(left, -2), some_positions(right, -1)
    shape = torch.broadcast_shapes(left.slots[0].factor.shape[:-2], right.slots[0].factor.shape[:-2])
    known: dict[bytes, Tensor] = {}
    heads: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tensor]] = {}
    for place in torch.cartesian_prod(*[torch.arange(n) for n in shape]).reshape(-1, len(shape)).tolist():
        a, b = head(left, place, transpose=False), head(right, place, transpose=True)
        rows, columns = coordinates_of(a), coordinates_of(b)
        pattern = pattern_of(a, rows) + pattern_of(b, columns)
        if pattern not in known:
            known[pattern] = torch.einsum("irx,jry->ijxy", dense(a, rows), dense(b, columns)).flatten(0, 1)
        heads.setdefault((tuple(rows.tolist()), tuple(columns.tolist())), []).append(known[pattern])
    return [
        Products(torch.tensor(r), torch.tensor(c), found[0] if len(found) == 1 else torch.cat(found))
        for (r, c), found in heads.items()
    ]


def some_positions(form: Form, axis: int) -> Form:
    """One position of every kind, a dozen at most: of more kinds, so many generic ones tell as much as all."""
    factors = torch.stack([s.factor for s in form.slots]).movedim(axis, 0).flatten(1)
    first = factors.abs().argmax(1, keepdim=True)
    shape = (factors / factors.gather(1, first).where(factors.gather(1, first) != 0, torch.ones(()))).round(decimals=9)
    kinds = torch.unique(shape, dim=0, return_inverse=True)[1]
    places = [int((kinds == k).nonzero()[0]) for k in kinds.unique()]
    places = sorted(places + [p for p in (0, len(factors) - 1) if p not in places])
    chosen = torch.tensor([places[i * (len(places) - 1) // (POSITIONS - 1)] for i in range(POSITIONS)]).unique()
    index = chosen if len(places) > POSITIONS else torch.tensor(places)
    keep = lambda x: x.index_select(axis, index)  # noqa: E731
    return form.with_slots([Slot(keep(s.coordinate), keep(s.factor)) for s in form.slots])


Head = list[tuple[Tensor, Tensor]]  # (positions, contracted) coordinates and factors, slot by slot


def head(form: Form, place: list[int], *, transpose: bool) -> Head:
    found = []
    for slot in form.slots:
        parts = []
        for value in (slot.coordinate, slot.factor):
            index = tuple(p if n > 1 else 0 for p, n in zip(place, value.shape[:-2], strict=True))
            parts.append(value[index].T if transpose else value[index])
        found.append((parts[0], parts[1]))
    return found


def coordinates_of(slots: Head) -> Tensor:
    found = torch.cat([c[f != 0].reshape(-1) for c, f in slots]).unique()
    return found[found != 0]


def pattern_of(slots: Head, coordinates: Tensor) -> bytes:
    """What makes two heads alike: the same factors on coordinates numbered from their own first."""
    return b"".join(
        torch.searchsorted(coordinates, c.contiguous()).numpy().tobytes() + f.contiguous().numpy().tobytes()
        for c, f in slots
    )


def dense(slots: Head, coordinates: Tensor) -> Tensor:
    """(positions, contracted, coordinates): the linear map as a matrix for every position."""
    out = torch.zeros(*slots[0][0].shape, max(len(coordinates), 1), dtype=torch.float64)
    for coordinate, factor in slots:
        valid = coordinate != 0
        inside = torch.where(valid, coordinate, coordinates[:1]).contiguous()
        where = torch.searchsorted(coordinates, inside).unsqueeze(-1)
        out.scatter_add_(-1, where, torch.where(valid, factor, 0.0).unsqueeze(-1))
    return out


@dataclass(frozen=True)
class Part:
    """Like components of a head: their group is all matrices of `count` by `count` entries, of `entry` dimensions each.

    An entry is a real number, or a complex one for rotary planes; one real vector is `grain` columns of entries.
    `left` and `right` are the places of the components among the coordinates of both sides.
    """

    count: int
    entry: int
    grain: int
    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def dimension(self) -> int:
        return self.count * self.count * self.entry


def commutant(products: Products) -> list[Part] | None:
    """The group of one head, part by part; None if no M is square and invertible."""
    first = best_map(products)
    if first is None:
        return None
    relative = relative_to(first, products)
    classes: dict[tuple[float, ...], list[list[int]]] = {}
    for component in connected(relative.abs().amax(0) > TOLERANCE):
        block = relative[:, component][:, :, component]
        trace = tuple(round(float(t), 6) for t in torch.diagonal(block, dim1=-2, dim2=-1).sum(-1))
        classes.setdefault((float(len(component)), *trace), []).append(component)
    return [part_of(alike, relative, first) for alike in classes.values()]


def part_of(components: list[list[int]], relative: Tensor, first: Tensor) -> Part:
    size = len(components[0])
    entry = endomorphisms(relative[:, components[0]][:, :, components[0]])
    left = [i for component in components for i in component]
    right = (first[left].abs().amax(0) > TOLERANCE).nonzero().reshape(-1).tolist()
    return Part(len(components), entry, max(1, size // entry), tuple(left), tuple(right))


def commutant_dimension(products: Products) -> int | None:
    """The dimension of the group for one head; None if no M is square and invertible."""
    parts = commutant(products)
    return None if parts is None else sum(part.dimension for part in parts)


def relative_maps(products: Products) -> Tensor | None:
    """N = M·M₀⁻¹ for every pair of positions."""
    first = best_map(products)
    return None if first is None else relative_to(first, products)


def relative_to(first: Tensor, products: Products) -> Tensor:
    return products.matrices @ torch.linalg.inv(first)


def best_map(products: Products) -> Tensor | None:
    """The M that is most safely inverted."""
    m = products.matrices
    if m.shape[1] != m.shape[2]:
        return None
    best = max(range(len(m)), key=lambda i: float(torch.linalg.cond(m[i]).reciprocal()))
    return None if float(torch.linalg.cond(m[best])) > 1e10 else m[best]


def connected(pattern: Tensor) -> list[list[int]]:
    """Coordinates that some N links, directly or through others."""
    n, seen, found = len(pattern), set[int](), []
    links = (pattern | pattern.T).tolist()
    for start in range(n):
        if start in seen:
            continue
        stack, component = [start], []
        seen.add(start)
        while stack:
            a = stack.pop()
            component.append(a)
            for b in range(n):
                if links[a][b] and b not in seen:
                    seen.add(b)
                    stack.append(b)
        found.append(sorted(component))
    return found


def endomorphisms(block: Tensor) -> int:
    """How many independent matrices commute with every N of one component; at least the multiples of 1 do."""
    n = block.shape[-1]
    if n == 1 or n > WIDEST:
        return 1
    eye = torch.eye(n, dtype=torch.float64)
    _, singular, basis = torch.linalg.svd(block.flatten(1), full_matrices=False)
    basis = basis[singular > TOLERANCE * float(singular[0])].reshape(-1, n, n)
    rows = [torch.kron(eye, b) - torch.kron(b.T.contiguous(), eye) for b in basis]
    singular = torch.linalg.svdvals(torch.cat(rows))
    return n * n - int((singular > TOLERANCE).sum())


def solutions(products: list[Products], size: int) -> list[Tensor]:
    """A basis of all (X, Y) at once, as matrices over coordinates: for narrow models, by singular values."""
    pairs = sorted({(int(a), int(b)) for p in products for side in (p.left, p.right) for a in side for b in side})
    number = {pair: i for i, pair in enumerate(pairs)}
    rows = [equations(p, number) for p in products]
    if not rows:
        return []
    _, singular, basis = torch.linalg.svd(torch.linalg.qr(torch.cat(rows), mode="r")[1])
    rank = int((singular > TOLERANCE * float(singular[0])).sum())
    found = []
    for vector in basis[rank:]:
        matrix = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        for (a, b), i in number.items():
            matrix[a, b] = vector[i]
        found.append(matrix)
    return found


def equations(products: Products, number: dict[tuple[int, int], int]) -> Float64[Tensor, "rows unknowns"]:
    """Xᵀ·M + M·Y = 0, entry (a, b) by entry: Σ_c X[c, a]·M[c, b] + M[a, c]·Y[c, b]."""
    m = products.matrices
    x, y = (
        torch.tensor([[number[int(i), int(j)] for j in side] for i in side]) for side in (products.left, products.right)
    )
    rows = torch.zeros(*m.shape, len(number), dtype=torch.float64)
    shape = (*m.shape, m.shape[1])
    rows.scatter_add_(-1, x.T[None, :, None, :].expand(shape), m.transpose(1, 2)[:, None, :, :].expand(shape))
    shape = (*m.shape, m.shape[2])
    rows.scatter_add_(-1, y.T[None, None, :, :].expand(shape), m[:, :, None, :].expand(shape))
    return rows.flatten(0, 2)
