"""Can an MLP without a skip connection do what one with a skip does, at the same width? d units are missing.

Published (arXiv 2510.23912): x + W_down σ(W_up x), with ReLU or GELU, no biases, width m ≥ d ≥ 2, equals a skip-free
MLP of the same width only if a set S of units has W_down[:,S] W_up[S,:] = −I, which has probability 0; 2d more units
absorb the skip. The theorem and its proof, which also says that d more units are enough and d − 1 are not, are in the
page that `report` writes. Measured, in float64:

1. the positive control: weights that satisfy the condition, and the skip-free MLP of the same width;
2. generic weights: the exact skip-free MLPs of width m + 2d and m + d; and the best of many fits of every width from m
   to m + d, by Levenberg-Marquardt, from starts that include the candidates of the theorem;
3. the Jacobian form: J(x) + J(−x) is the same matrix for all x, and what separates it from that of a skip-free MLP is
   D_S = I + W_down[:,S] W_up[S,:]; its rank, over every S, is the least number of units missing.

    python studies/s2_skips.py run --out studies/s2_skips.json
    python studies/s2_skips.py report studies/s2_skips.json --markdown docs/skip-boundary.md
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn import functional as F

from deadweight.report.figure import pyplot, save
from deadweight.report.record import OutOption, add_report, circumstances, save_record
from deadweight.threads import one_thread

app = typer.Typer(add_completion=False, help=__doc__)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
FITTED = ("relu", "gelu")  # those of the claim
EXACT = 1e-12  # of a relative error in float64
SIZES = ((2, 4), (4, 8), (16, 64), (64, 256))  # d, m: the exact constructions


@dataclass(frozen=True)
class MLP:
    """x ↦ down · σ(up · x), plus x if it has a skip. up is (units, d), down is (d, units)."""

    up: Tensor
    down: Tensor
    activation: str
    skip: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        y = ACTIVATIONS[self.activation](x @ self.up.T) @ self.down.T
        return x + y if self.skip else y


def random_mlp(d: int, m: int, activation: str, generator: torch.Generator) -> MLP:
    """Random weights of variance 1/d and 1/m, so that both summands have the same size."""
    up = torch.randn(m, d, dtype=torch.float64, generator=generator) * d**-0.5
    down = torch.randn(d, m, dtype=torch.float64, generator=generator) * (2 / m) ** 0.5
    return MLP(up, down, activation, skip=True)


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def controlled(f: MLP, units: int, rank: int = 0) -> MLP:
    """The same MLP with W_down[:,S] changed, S the first units, so that I + W_down[:,S] W_up[S,:] is C · (last rows of
    W_up), of the given rank: 0 is the theorem's condition."""
    missing = f.down[:, :rank] @ f.up[len(f.up) - rank :]
    down = (missing - eye(f.up.shape[1])) @ torch.linalg.pinv(f.up[:units])
    return MLP(f.up, torch.cat([down, f.down[:, units:]], 1), f.activation, skip=True)


def flipped(f: MLP, units: int) -> MLP:
    """The MLP without a skip whose first units have the opposite sign: σ(−z) = σ(z) − z."""
    return MLP(torch.cat([-f.up[:units], f.up[units:]]), f.down, f.activation)


def with_pairs(f: MLP) -> MLP:
    """m + 2d units: x = σ(x) − σ(−x), one pair per channel."""
    one = eye(f.up.shape[1])
    return MLP(torch.cat([f.up, one, -one]), torch.cat([f.down, one, -one], 1), f.activation)


def with_mirrors(f: MLP, own: Tensor, flips: int = 0) -> MLP:
    """One more unit for each of `own`, its mirror image: (a − c) σ(w·x) + c σ(−w·x) = a σ(w·x) − c (w·x).

    Together they make up for any D = I + W_down[:,S] W_up[S,:] (S the first `flips` units) whose rows the rows of own
    span: d independent units for any D at all.
    """
    missing, rows = eye(f.up.shape[1]) + f.down[:, :flips] @ f.up[:flips], f.up[own]
    c = -missing @ torch.linalg.pinv(rows)
    base = flipped(f, flips)
    down = base.down.index_add(1, own, -c)
    return MLP(torch.cat([base.up, -rows]), torch.cat([down, c], 1), f.activation)


def independent(rows: Tensor) -> Tensor:
    """Indices of d well-conditioned rows: each time the row with the largest component outside those chosen."""
    left, chosen = rows.clone(), []
    for _ in range(rows.shape[1]):
        chosen.append(int(left.norm(dim=1).argmax()))
        direction = F.normalize(left[chosen[-1]], dim=0)
        left = left - (left @ direction)[:, None] * direction
        left[chosen] = 0
    return torch.tensor(chosen)


def error(f: MLP, g: Callable[[Tensor], Tensor], generator: torch.Generator, n: int = 1000) -> float:
    """The root mean square of the difference, relative to that of f, on new points."""
    x = torch.randn(n, f.up.shape[1], dtype=torch.float64, generator=generator)
    return float((g(x) - f(x)).norm() / f(x).norm())


def constructions(d: int, m: int, activation: str, seed: int) -> dict[str, Any]:
    """The exact constructions, and their neighbours that are not exact."""
    random = torch.Generator().manual_seed(seed)
    f = random_mlp(d, m, activation, random)
    units, rank = min(m - d // 2, 3 * d // 2), d // 2  # S, and a case between the two
    control, between = controlled(f, units), controlled(f, units, rank)
    last = torch.arange(m - rank, m)
    return {
        "d": d,
        "m": m,
        "activation": activation,
        "seed": seed,
        "control": error(control, flipped(control, units), random),
        "control, one unit not flipped": error(control, flipped(control, units - 1), random),
        "generic, same flips": error(f, flipped(f, units), random),
        "between": error(between, with_mirrors(between, last, units), random),
        "between, one unit less": error(between, with_mirrors(between, last[1:], units), random),
        "m + 2d": error(f, with_pairs(f), random),
        "m + d": error(f, with_mirrors(f, independent(f.up)), random),
        "m + d - 1": error(f, with_mirrors(f, independent(f.up)[:-1]), random),
    }


Params = tuple[Tensor, Tensor]  # up: starts × units × d; down: starts × d × units


def residuals(p: Params, x: Tensor, y: Tensor, activation: str) -> Tensor:
    return torch.einsum("sdm,snm->snd", p[1], ACTIVATIONS[activation](torch.einsum("nd,smd->snm", x, p[0]))) - y


def jacobian(p: Params, x: Tensor, activation: str) -> Tensor:
    """The Jacobian of the residuals (starts × n·d) by all elements of up, then of down."""
    z = torch.einsum("nd,smd->snm", x, p[0])
    value, slope = ACTIVATIONS[activation](z), vmap(vmap(vmap(torch.func.grad(ACTIVATIONS[activation]))))(z)
    by_up = torch.einsum("som,snm,ni->snomi", p[1], slope, x)
    by_down = torch.einsum("oq,snm->snoqm", eye(x.shape[1]), value)
    return torch.cat([by_up.flatten(3), by_down.flatten(3)], 3).flatten(1, 2)


def fit(f: MLP, starts: Params, x: Tensor, iterations: int) -> Params:
    """Levenberg-Marquardt from all starts at once; each has its own damping, and its error never rises."""
    y, p, damping = f(x), starts, torch.full((len(starts[0]), 1, 1), 1e-2, dtype=torch.float64)
    r = residuals(p, x, y, f.activation)
    for _ in range(iterations):
        j = jacobian(p, x, f.activation)
        normal, slope = j.mT @ j, j.mT @ r.flatten(1)[..., None]
        diagonal = torch.diag_embed(normal.diagonal(dim1=1, dim2=2) + 1e-12)
        step = torch.linalg.solve(normal + damping * diagonal + 1e-14 * eye(normal.shape[1]), slope)[..., 0]
        cut = p[0][0].numel()
        moved = p[0] - step[:, :cut].view_as(p[0]), p[1] - step[:, cut:].view_as(p[1])
        new = residuals(moved, x, y, f.activation)
        better = (new.square().sum((1, 2)) < r.square().sum((1, 2)))[:, None, None]
        p = torch.where(better, moved[0], p[0]), torch.where(better, moved[1], p[1])
        r = torch.where(better, new, r)
        damping = torch.where(better, damping * 0.3, damping * 4).clamp(1e-12, 1e8)
    return p


def starting(f: MLP, extra: int, n: int, random: torch.Generator) -> Params:
    """Every choice of signs of f's own units (the candidates of the theorem), and as many random starts; more units are
    random."""
    m, d = f.up.shape
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=m)), dtype=torch.float64)[:n]
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=random)  # noqa: E731
    up = torch.cat([signs[:, :, None] * f.up, draw(len(signs), m, d)])
    down = torch.cat([f.down.expand(len(signs), d, m), draw(len(signs), d, m) * m**-0.5])
    more = draw(len(up), extra, d), 0.3 * draw(len(up), d, extra)
    return torch.cat([up, more[0]], 1), torch.cat([down, more[1]], 2)


def fits(d: int, m: int, activation: str, seed: int, n_starts: int, iterations: int) -> list[dict[str, Any]]:
    """The best fit of every width from m to m + d, evaluated on new points."""
    random = torch.Generator().manual_seed(seed)
    f, rows = random_mlp(d, m, activation, random), []
    x = torch.randn(40 * d, d, dtype=torch.float64, generator=random)
    fresh = torch.randn(1000, d, dtype=torch.float64, generator=random)
    for extra in range(d + 1):
        p = fit(f, starting(f, extra, n_starts // 2, random), x, iterations)
        off = residuals(p, fresh, f(fresh), activation).square().sum((1, 2)).sqrt() / f(fresh).norm()
        off = off[torch.isfinite(off)]
        told = {"d": d, "m": m, "activation": activation, "seed": seed, "extra": extra, "starts": len(p[0])}
        rows.append({**told, "best": float(off.min()), "median": float(off.median())})
    return rows


def jacobian_sums(f: MLP, n: int, random: torch.Generator) -> Tensor:
    """J(x) + J(−x) at n points, by automatic differentiation."""
    x = torch.randn(n, f.up.shape[1], dtype=torch.float64, generator=random)
    each = vmap(jacrev(f))
    return each(x) + each(-x)


def ranks(d: int, m: int, activation: str, draws: int) -> dict[str, Any]:
    """D_S for every S of many random MLPs: its rank, and the smallest distance to the condition."""
    signs = torch.tensor(list(itertools.product((0.0, 1.0), repeat=m)), dtype=torch.float64)
    lowest, nearest, smallest, constant = d, float("inf"), float("inf"), 0.0
    for seed in range(draws):
        random = torch.Generator().manual_seed(seed)
        f = random_mlp(d, m, activation, random)
        gaps = eye(d) + torch.einsum("sm,om,mi->soi", signs, f.down, f.up)
        values = torch.linalg.svdvals(gaps)
        lowest = min(lowest, int((values > 1e-10 * values[:, :1]).sum(1).min()))
        nearest = min(nearest, float(gaps.flatten(1).norm(dim=1).min()) / d**0.5)
        smallest = min(smallest, float((values[:, -1] / values[:, 0]).min()))
        sums = jacobian_sums(f, 8, random)
        constant = max(constant, float((sums - 2 * eye(d) - f.down @ f.up).abs().max()))
    control = controlled(random_mlp(d, m, activation, torch.Generator().manual_seed(draws)), m - 1)
    gap = eye(d) + control.down[:, : m - 1] @ control.up[: m - 1]
    return {
        "d": d,
        "m": m,
        "activation": activation,
        "draws": draws,
        "sets": len(signs),
        "lowest_rank": lowest,
        "nearest": nearest,
        "smallest_singular_value": smallest,
        "jacobian_sum_error": constant,
        "control_distance": float(gap.norm()) / d**0.5,
    }


def dimensions(d: int, m: int, activation: str) -> dict[str, Any]:
    """The dimension of the function space of each kind: the rank of the Jacobian by all weights."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20 * m, d, dtype=torch.float64, generator=random)
    ranks = {}
    for skip in (True, False):
        f = random_mlp(d, m, activation, random)
        whole = lambda up, down, skip=skip: MLP(up, down, activation, skip)(x).flatten()  # noqa: E731
        parts = jacrev(whole, (0, 1))(f.up, f.down)
        values = torch.linalg.svdvals(torch.cat([q.flatten(1) for q in parts], 1))
        ranks["skip" if skip else "no skip"] = int((values > 1e-10 * values[0]).sum())
    return {"d": d, "m": m, "activation": activation, "parameters": 2 * d * m, **ranks}


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    d: int = 3  # of the fits
    m: int = 6
    starts: int = 128
    iterations: int = 80
    draws: int = 200
    sizes: tuple[tuple[int, int], ...] = SIZES


@app.command()
def run(
    out: OutOption,
    seeds: Annotated[int, typer.Option(help="Random MLPs of every kind.")] = 3,
    starts: Annotated[int, typer.Option(help="Starts of every fit.")] = 128,
    iterations: Annotated[int, typer.Option(help="Iterations of every fit.")] = 80,
    draws: Annotated[int, typer.Option(help="Random MLPs for the ranks.")] = 200,
    largest: Annotated[int, typer.Option(help="Width of the largest exact construction.")] = 64,
) -> None:
    """Measure, and write the record."""
    sizes = tuple(pair for pair in SIZES if pair[0] <= largest)
    s = Settings(seeds=seeds, starts=starts, iterations=iterations, draws=draws, sizes=sizes)
    record: dict[str, Any] = {"setting": setting(s), "exact": [], "fits": [], "ranks": [], "dimensions": []}
    with one_thread():
        for activation in ACTIVATIONS:
            print(activation, flush=True)
            for seed in range(s.seeds):
                record["exact"] += [constructions(d, m, activation, seed) for d, m in s.sizes]
                if activation in FITTED:
                    record["fits"] += fits(s.d, s.m, activation, seed, s.starts, s.iterations)
            record["ranks"] += [ranks(d, m, activation, s.draws) for d, m in ((2, 4), (3, 6), (4, 10))]
            record["dimensions"].append(dimensions(s.d, s.m, activation))
            save_record(out, record)


def setting(s: Settings) -> dict[str, Any]:
    return {**asdict(s), "precision": "float64", **circumstances()}


THEOREM = """\
## The theorem

Let σ be ReLU, GELU (also its tanh form) or SiLU, d ≥ 2, and f(x) = x + W_down σ(W_up x) with m units, no biases, rows
w_i of W_up nonzero and no two of them parallel, columns a_i of W_down nonzero. (Other weights have measure
zero.) Write D_S = I + W_down[:,S] W_up[S,:] for a set S of units.

1. f is a skip-free MLP of the same width m if and only if D_S = 0 for some S.
2. A skip-free MLP with fewer than m + min_S rank(D_S) units is never f.
3. For almost all weights rank(D_S) = d for every S. So f needs at least m + d units, and for m ≥ d this many are
   enough. m + 2d units are enough for all weights, also for m < d.

**Proof.** All these σ are z/2 plus an even function h: h(z) = |z|/2 for ReLU, z·erf(z/√2)/2 for GELU, z·tanh(z/2)/2
for SiLU. So σ(z) − σ(−z) = z. Split f and a skip-free g(x) = Σ_j b_j σ(u_j·x) into even and odd parts:

    even:  Σ_i a_i h(w_i·x)   = Σ_j b_j h(u_j·x)
    odd:   x + ½ Σ_i a_i w_i·x = ½ Σ_j b_j u_j·x

*Even functions of different directions are independent.* For ReLU, |w·x| has its kink on the plane w·x = 0, and no
other unit has a kink there. For GELU and SiLU, put x = t·v with a v for which the |w_i·v| differ: the functions t ↦
h(c_i t) with different c_i > 0 are independent, since h is analytic, even and no polynomial (its nonzero Taylor
coefficients give a generalised Vandermonde matrix, which has a nonzero determinant). So every w_i must be among the
±u_j (for ReLU up to a positive factor, which moves into b_j), and the b_j of all u_j on one w_i add up to a_i.

*Width m:* then each w_i has one u_i = ±w_i and b_i = a_i. With S the set of minus signs, the odd part says x = −Σ_S
a_i w_i·x, which is D_S = 0. Conversely, if D_S = 0, flip the signs of the rows S.

*Width m + k:* a w_i with one unit contributes, as before, 0 or −a_i w_iᵀ to the linear part. A w_i with further units
contributes any c w_iᵀ, of rank one, and takes at least one more unit. A direction that f does not have contributes any
c uᵀ, of rank one, and takes at least two (a unit of GELU or SiLU with another length counts as a new direction). So k
more units add a linear map of rank at most k to that of the signs: D_S must have rank at most k for some S.

*Almost all weights:* det D_S is a polynomial in the weights, and it is 1 at W_down = 0: it vanishes on a set of
measure zero, for each of the finitely many S. *Enough:* take d independent rows w_i and solve −Σ c_i w_iᵀ = I; the
units w_i with a_i − c_i and their mirror images −w_i with c_i give f. Without d independent rows, pairs ±e_j with ±e_j
give it, with 2d units. ∎

*The Jacobian form.* σ'(z) + σ'(−z) = 1, so J_f(x) + J_f(−x) = 2I + W_down W_up at every x (for ReLU, off the kinks),
and for the candidate with the signs S the sum is smaller by exactly 2·D_S. So the rank of that difference, smallest
over S, is a lower bound on the number of missing units: for almost all weights both are d. The condition d ≥ 2 is
needed: with d = 1 all directions are parallel, and two ReLU units can represent every such function. Both families of
functions have the same dimension (below), so counting dimensions does not show the difference; they are different
sets."""


def cells(record: dict[str, Any], activation: str, d: int, names: list[str]) -> list[str]:
    mine = [e for e in record["exact"] if e["activation"] == activation and e["d"] == d]
    return [span([e[name] for e in mine]) for name in names]


def span(values: list[float]) -> str:
    return f"{max(values):.1e}" if max(values) < 1e-9 else f"{min(values):.2g} … {max(values):.2g}"


def written(record: dict[str, Any]) -> str:
    s = record["setting"]
    return "\n".join(
        [
            "# How many units replace a skip connection",
            "",
            "This page proves and tests when an MLP without a skip connection can compute the same function as one "
            "with it (arXiv 2510.23912): for almost all weights it needs d more hidden units, where d is the width.",
            "",
            "## Verdicts",
            "",
            *verdicts(record),
            "",
            f"Written by `studies/s2_skips.py` from its record: float64, torch {s['torch']}, {s['machine']}, "
            f"{s['seeds']} seeds. Errors are root mean squares over 1,000 fresh normal points, relative to f, the MLP "
            "with the skip.",
            "",
            THEOREM,
            "",
            "## Exact constructions, and cases next to them",
            "",
            *exact_table(record),
            "",
            "## The smallest error of many fits",
            "",
            *fit_table(record),
            "",
            "![fits](skip-boundary.svg)",
            "",
            "## Ranks of D_S over every S",
            "",
            *rank_table(record),
            "",
        ]
    )


EXACT_NAMES = ["control", "between", "m + d", "m + 2d"]
WRONG_NAMES = ["control, one unit not flipped", "generic, same flips", "between, one unit less", "m + d - 1"]


def exact_table(record: dict[str, Any]) -> list[str]:
    lines = [
        "*Control*: W_down[:,S] = −pinv(W_up[S,:]), rows S flipped, same width. *Between*: rank(D_S) = d/2, and d/2 "
        "more units. If the errors should be zero, the largest is shown; otherwise smallest … largest.",
        "",
        f"| σ | d | m | {' | '.join(EXACT_NAMES)} | {' | '.join(WRONG_NAMES)} |",
        "| --- " * 11 + "|",
    ]
    for activation in ACTIVATIONS:
        for d, m in record["setting"]["sizes"]:
            row = cells(record, activation, d, [*EXACT_NAMES, *WRONG_NAMES])
            lines.append(f"| {activation} | {d} | {m} | {' | '.join(row)} |")
    return lines


def best(record: dict[str, Any], activation: str, extra: int) -> list[float]:
    return [f["best"] for f in record["fits"] if f["activation"] == activation and f["extra"] == extra]


def fit_table(record: dict[str, Any]) -> list[str]:
    s = record["setting"]
    lines = [
        f"d = {s['d']}, m = {s['m']}: Levenberg-Marquardt, {s['iterations']} iterations, from {s['starts']} starts "
        f"(all {2 ** s['m']} sign patterns of f's own units, and as many random ones). The error of the best "
        f"start, for {s['seeds']} random f: smallest … largest. The last column is the exact construction.",
        "",
        "| σ | " + " | ".join(f"m + {k}" for k in range(s["d"] + 1)) + f" | m + {s['d']}, by construction |",
        "| --- " * (s["d"] + 3) + "|",
    ]
    for activation in FITTED:
        fits_by_width = [span(best(record, activation, k)) for k in range(s["d"] + 1)]
        exact = span([e["m + d"] for e in record["exact"] if e["activation"] == activation and e["d"] <= 4])
        lines.append(f"| {activation} | {' | '.join(fits_by_width)} | {exact} |")
    return lines


def rank_table(record: dict[str, Any]) -> list[str]:
    lines = [
        "*Nearest*: the smallest ‖D_S‖/√d over all S and draws; 0 would be the condition, and *control* is its value "
        "there. *J(x) + J(−x)*: its largest distance from 2I + W_down W_up, by automatic differentiation.",
        "",
        "| σ | d | m | draws × sets | lowest rank | nearest | control | smallest σ_d/σ_1 | J(x) + J(−x) |",
        "| --- " * 9 + "|",
    ]
    for r in record["ranks"]:
        lines.append(
            f"| {r['activation']} | {r['d']} | {r['m']} | {r['draws']} × {r['sets']} | {r['lowest_rank']} | "
            f"{r['nearest']:.2g} | {r['control_distance']:.1e} | {r['smallest_singular_value']:.1e} | "
            f"{r['jacobian_sum_error']:.1e} |"
        )
    lines += ["", "| σ | parameters | dimensions with the skip | without |", "| --- " * 4 + "|"]
    lines += [f"| {r['activation']} | {r['parameters']} | {r['skip']} | {r['no skip']} |" for r in record["dimensions"]]
    return lines


def verdicts(record: dict[str, Any]) -> list[str]:
    worst = {n: max(e[n] for e in record["exact"]) for n in EXACT_NAMES}
    d = record["setting"]["d"]
    floor = min(v for a in FITTED for v in best(record, a, 0))
    below = min(v for a in FITTED for v in best(record, a, d - 1))
    full = all(r["lowest_rank"] == r["d"] for r in record["ranks"])

    def said(holds: bool) -> str:
        return "holds" if holds else "not seen here"

    return [
        "| claim (arXiv 2510.23912) | found | verdict |",
        "| --- | --- | --- |",
        f"| the condition makes a skip-free MLP of the same width | {worst['control']:.1e} | "
        f"{said(worst['control'] <= EXACT)} |",
        f"| generic weights: the error at width m cannot vanish | {floor:.2g} or more | {said(floor > 1e-4)} |",
        f"| 2d more units absorb the skip | {worst['m + 2d']:.1e} | {said(worst['m + 2d'] <= EXACT)}, and d are "
        f"enough ({worst['m + d']:.1e}); with d − 1 the best fit stays at {below:.2g} or more |",
        f"| the condition has probability 0 | rank d for every S in every draw: {full} | {said(full)} |",
    ]


def figure(record: dict[str, Any], file: Path) -> None:
    """Best fit against units beyond m."""
    picture, axes = pyplot().subplots(figsize=(6.5, 3.8), layout="constrained")
    d = record["setting"]["d"]
    for place, activation in enumerate(FITTED):
        shift = 0.06 * (place - 1)
        for extra in range(d + 1):
            values = best(record, activation, extra)
            axes.scatter([extra + shift] * len(values), values, s=16, c=f"C{place}", marker="osD"[place])
        middle = [statistics.median(best(record, activation, k)) for k in range(d + 1)]
        axes.plot([k + shift for k in range(d + 1)], middle, c=f"C{place}", linewidth=0.8, label=activation)
        exact = [e["m + d"] for e in record["exact"] if e["activation"] == activation and e["d"] <= 4]
        axes.scatter([d + shift], [max(exact)], marker="*", s=60, c=f"C{place}")
    axes.set_yscale("log")
    axes.set_xticks(range(d + 1), [f"m + {k}" for k in range(d + 1)])
    axes.set_ylabel("relative error of the best fit")
    axes.set_title(f"A skip-free MLP of more and more units, d = {d} (stars: by construction)", fontsize=9)
    axes.legend(fontsize=8)
    save(picture, file)


add_report(app, written, figure)

if __name__ == "__main__":
    app()
