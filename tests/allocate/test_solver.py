"""The solver: equal to trying everything, fast where that is impossible, and clear where nothing fits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from deadweight.allocate.bound import HeadGroup, Task, error
from deadweight.allocate.constraints import LayerBudget, Rules
from deadweight.allocate.dual import Problem, at_price
from deadweight.allocate.relaxed import relax
from deadweight.allocate.solver import solve
from deadweight.errors import DeadweightError

FOUR_GRAM = Task((1.0,) * 4, d_token=8)


def every_allocation(n_lags: int, width: int, rules: Rules, widest: int) -> Iterator[tuple[HeadGroup, ...]]:
    """All of them, by trying: sizes up to `widest`, whatever the token's size."""
    groups = [
        HeadGroup(heads, size)
        for size in range(rules.multiple, widest + 1, rules.multiple)
        for heads in range(rules.sharing, width // size + 1, rules.sharing)
    ]
    for lags in [rules.lags] if rules.lags else range(1, n_lags + 1):
        yield from within(groups, lags, width, rules.one_size)


def within(groups: list[HeadGroup], lags: int, width: float, one_size: bool) -> Iterator[tuple[HeadGroup, ...]]:
    if lags == 0:
        yield ()
        return
    for first in groups:
        if first.width <= width:
            rest = [g for g in groups if g.size == first.size] if one_size else groups
            for others in within(rest, lags - 1, width - first.width, one_size):
                yield (first, *others)


def random_instance(seed: int) -> tuple[Task, int, Rules]:
    random = np.random.default_rng(seed)
    n_lags = int(random.integers(1, 4))
    profile = random.choice([0.0, 0.1, 0.5, 1.0, 2.0], n_lags) + random.random(n_lags) * random.integers(0, 2)
    profile[int(random.integers(n_lags))] += 0.3
    profile *= random.choice([0.01, 1.0, 30.0])
    epsilon, scale = random.choice([0.0, 0.3]), random.choice([1.0, 2.5])
    task = Task(tuple(profile), int(random.integers(1, 13)), scale, epsilon)
    rules = Rules(
        multiple=int(random.choice([1, 1, 2, 3])),
        one_size=bool(random.integers(2)),
        sharing=int(random.choice([1, 1, 2])),
        lags=int(random.integers(1, n_lags + 1)) if random.random() < 0.3 else None,
    )
    least = rules.least * (rules.lags or 1)
    return task, int(random.integers(least, max(least + 1, 22))), rules


@pytest.mark.parametrize("batch", range(10))
def test_the_optimum_is_that_of_trying_everything(batch: int) -> None:
    for seed in range(20 * batch, 20 * batch + 20):
        task, width, rules = random_instance(seed)
        best = min(error(task, g) for g in every_allocation(len(task.profile), width, rules, task.d_token + 3))
        found = solve(task, width, rules)
        assert found.error == pytest.approx(best, rel=1e-12), (seed, found)
        assert found.error == error(task, found.groups)
        assert keeps(found.groups, width, rules), (seed, found)


def keeps(groups: tuple[HeadGroup, ...], width: int, rules: Rules) -> bool:
    sizes = {g.size for g in groups}
    return (
        sum(g.width for g in groups) <= width
        and all(g.size % rules.multiple == 0 and g.heads % rules.sharing == 0 for g in groups)
        and (len(sizes) == 1 or not rules.one_size)
        and (rules.lags is None or len(groups) == rules.lags)
    )


@pytest.mark.parametrize("seed", range(6))
def test_larger_instances_agree_with_a_plain_dynamic_program(seed: int) -> None:
    """Another way to the same number: no prices, every width."""
    random = np.random.default_rng(seed)
    task = Task(tuple(random.random(8) * random.choice([1, 10], 8)), int(random.choice([7, 16, 23])))
    width = int(random.integers(150, 260))
    assert solve(task, width).error == pytest.approx(plain(task, width), rel=1e-12)


def plain(task: Task, width: int) -> float:
    spent = np.full(width + 1, np.inf)
    spent[0] = 0.0
    best = np.inf
    for lag, (weight, placing) in enumerate(zip(task.weights, task.placing, strict=True)):
        costs = [
            min(
                weight * float(task.truncation(size)) + weight * placing / (w // size)
                for size in range(1, task.d_token + 1)
                if size <= w
            )
            for w in range(1, width + 1)
        ]
        spent = np.array(
            [min((spent[w - c] + costs[c - 1] for c in range(1, w + 1)), default=np.inf) for w in range(width + 1)]
        )
        best = min(best, float(spent.min()) + float(task.tails[lag + 1]))
    return best


PROFILES = {
    "power law": [1 / m for m in range(1, 257)],
    "exponential": [float(np.exp(-m / 20)) for m in range(256)],
    "flat": [1.0] * 256,
    "random": list(np.random.default_rng(0).random(256)),
}


@pytest.mark.parametrize(
    ("profile", "d_token", "rules"),
    [
        *((name, d, Rules()) for name in PROFILES for d in (1, 16, 97, 1024)),
        *((name, 100, Rules(one_size=True)) for name in PROFILES),
        *((name, 64, Rules(multiple=8, sharing=4)) for name in PROFILES),
    ],
)
def test_a_large_budget_with_many_lags_takes_less_than_two_seconds(profile: str, d_token: int, rules: Rules) -> None:
    task = Task(tuple(PROFILES[profile]), d_token)
    start = time.perf_counter()
    found = solve(task, 16384, rules)
    assert time.perf_counter() - start < 2.0
    assert keeps(found.groups, 16384, rules) and found.floor <= found.error * (1 + 1e-12)


def test_the_four_gram_optimum_is_eight_heads_of_eight_for_each_of_four_lags() -> None:
    assert solve(FOUR_GRAM, 256).groups == (HeadGroup(8, 8),) * 4


@pytest.mark.parametrize(
    ("task", "groups"),
    [
        (Task((1.0,) * 4, 16), (HeadGroup(4, 16),) * 4),  # larger tokens need larger heads
        (Task((1.0,) * 4, 4), (HeadGroup(16, 4),) * 4),
        (Task((1.0, 0.5, 0.25, 0.125), 8), (HeadGroup(12, 8), HeadGroup(9, 8), HeadGroup(6, 8), HeadGroup(5, 8))),
        (Task((1.0,) * 2, 8), (HeadGroup(16, 8),) * 2),
    ],
)
def test_it_is_another_optimum_for_other_tokens_and_profiles(task: Task, groups: tuple[HeadGroup, ...]) -> None:
    assert solve(task, 256).groups == groups


@pytest.mark.parametrize("price", [1e-4, 1e-2, 0.1, 1.0])
def test_a_price_never_chooses_a_size_between_the_ends(price: float) -> None:
    """The concavity that `dual` rests on, by trying all sizes and many heads."""
    task = Task((0.7,), 20)
    problem = Problem(task, tuple(range(3, 31, 3)), 1, 1000)  # 18 and 21 are next to 20
    value = at_price(problem, 1, price).phi[0]
    tried = min(
        0.7 * float(task.truncation(d)) + 0.7 * task.placing[0] / h + price * d * h
        for d, h in itertools.product(problem.sizes, range(1, 2000))
    )
    assert value == pytest.approx(tried, rel=1e-12)
    assert [problem.sizes[i] for i in problem.ends] == [3, 18, 21]


def test_no_whole_numbers_beat_the_relaxation_at_the_tokens_size() -> None:
    task = Task(tuple(1 / m for m in range(1, 20)), 8)
    for width in (64, 200, 1000):
        loose, found = relax(task, width), solve(task, width, Rules(multiple=8))
        assert loose.error <= found.error
        assert sum(loose.heads) * 8 == pytest.approx(width)
    assert abs(loose.error / found.error - 1) < 0.01  # and with enough heads they meet


@pytest.mark.parametrize(
    ("budget", "rules", "words"),
    [
        (
            LayerBudget(7),
            Rules(multiple=8),
            ["budget D of 7", "expected 8 or more", "1 head of size 8", "budget D is 8"],
        ),
        (LayerBudget(100), Rules(multiple=8, sharing=4, lags=4), ["expected 128 or more", "4 heads that share keys"]),
        (LayerBudget(256, kv_bytes=20), Rules(multiple=8), ["cache budget", "bytes per token is 32"]),
        (
            LayerBudget(256, flops=5e3, d_model=64, context=100),
            Rules(multiple=8),
            ["FLOP budget", "per token is 7,296"],
        ),
        (LayerBudget(-3), Rules(), ["budget D of -3", "budget D is 1"]),
        (LayerBudget(256), Rules(lags=9), ["lags = 9", "at most the 4 lags"]),
    ],
)
def test_an_infeasible_budget_is_named_with_the_nearest_feasible_one(
    budget: LayerBudget, rules: Rules, words: list[str]
) -> None:
    with pytest.raises(DeadweightError) as refused:
        solve(FOUR_GRAM, budget, rules)
    for word in words:
        assert word in str(refused.value)


def test_the_nearest_feasible_budget_is_feasible() -> None:
    rules = Rules(multiple=8, sharing=2, lags=2)
    assert solve(FOUR_GRAM, LayerBudget(256, kv_bytes=64), rules).width == 32
    assert solve(FOUR_GRAM, LayerBudget(256, flops=4 * 32 * (64 * 1.5 + 10), d_model=64, context=10), rules).width == 32


def test_the_tightest_budget_decides() -> None:
    free, cached = solve(FOUR_GRAM, 256), solve(FOUR_GRAM, LayerBudget(256, kv_bytes=400))
    assert cached.limit.name.startswith("cache") and 2 * 2 * cached.width <= 400 < 2 * 2 * free.width
    assert cached.error > free.error
    assert solve(FOUR_GRAM, LayerBudget(256, kv_bytes=400), Rules(sharing=4)).width > cached.width


@pytest.mark.parametrize("options", [{"multiple": 0}, {"sharing": -1}, {"lags": 0}])
def test_rules_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(DeadweightError, match="expected a whole number above zero"):
        Rules(**options)
