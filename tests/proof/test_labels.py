"""Labels as amounts: what must be equal, what must differ, and what must stay zero."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deadweight.proof.labels import CACHED, constant_along, fold, fresh, key, mix, scramble

NUMBERS = st.integers(min_value=-(2**62), max_value=2**62)


def label(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(NUMBERS, NUMBERS)
def test_scramble_is_one_to_one(a: int, b: int) -> None:
    assert bool(scramble(label(a)) == scramble(label(b))) == (a == b)


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_mixing_keeps_zero_and_nothing_else(values: list[int]) -> None:
    mixed = mix(label(*values), key("factor"), label(*reversed(values)))
    assert torch.equal(mixed == 0, label(*values) == 0)


def test_mixing_tells_the_order_of_factors_apart() -> None:
    assert mix(label(5), 1, 2) != mix(label(5), 2, 1)


@given(st.lists(NUMBERS, min_size=2, max_size=5))
def test_labels_add_as_amounts_do(values: list[int]) -> None:
    a, b = label(*values), scramble(label(*values))
    assert torch.equal(a + b - b, a) and torch.equal((a + b) - (b + a), torch.zeros_like(a))


def test_fold_is_sensitive_to_order_and_zero_for_zeros() -> None:
    assert fold(label(3, 4, 5), 0) != fold(label(4, 3, 5), 0)
    assert fold(label(3, 4), 0) == fold(label(3, 4), 0)
    assert fold(label(0, 0, 0), 0) == 0 and fold(label(0, 7, 0), 0) != 0


def test_fold_agrees_line_by_line() -> None:
    lines = torch.stack([label(1, 2, 3), label(1, 2, 3), label(1, 2, 4)])
    folded = fold(lines, 1)
    assert folded[0] == folded[1] != folded[2]


def test_a_repeated_label_is_not_one_label_among_zeros() -> None:
    assert fold(label(9).expand(4), 0) != fold(label(9, 0, 0, 0), 0)


def test_a_label_repeated_three_times_is_not_one_repeated_six_times() -> None:
    assert fold(label(9).expand(3), 0) != fold(label(9).expand(6), 0)


def test_fresh_labels_differ_everywhere_and_by_name() -> None:
    labels = torch.cat([fresh((50,), "a"), fresh((50,), "b")])
    assert len(labels.unique()) == 100 and torch.equal(fresh((3, 2), "a"), fresh((3, 2), "a"))


def test_half_a_million_names_have_as_many_keys() -> None:
    names = [f"layer {i % 997} of {i * i}" for i in range(500_000)]
    assert len({key(name) for name in names}) == len(set(names))


def test_the_parts_of_a_key_are_told_apart() -> None:
    keys = [key("a", "b"), key("a|b"), key("ab"), key("b", "a"), key(1), key("1"), key(1.0), key(-1.0), key(), key("")]
    assert len(set(keys)) == len(keys) and key("a", 1.5) == key("a", 1.5)


def test_constant_along_looks_at_the_named_axes_only() -> None:
    rows = torch.stack([label(1, 1), label(2, 2)])
    assert constant_along(rows, (1,)) and not constant_along(rows, (0,)) and constant_along(rows, ())


def test_labels_hashed_in_parts_are_those_hashed_one_by_one() -> None:
    many = torch.arange(2 * CACHED + 3).reshape(-1, 1).expand(-1, 2).T
    alone = {i: int(scramble(torch.tensor(i))) for i in (0, CACHED - 1, CACHED, 2 * CACHED + 2)}
    assert all(scramble(many)[:, i].tolist() == [label, label] for i, label in alone.items())
    assert len(scramble(many).unique()) == many.shape[1]
    assert torch.equal(many[0], torch.arange(2 * CACHED + 3))
