"""Threads: one where that is faster, and never at the price of wrong or endless linear algebra in the same process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deadweight import threads
from deadweight.threads import each, eigen, inverse, one_thread, threads_for

AFTERWARDS = """
import torch
from deadweight.threads import one_thread
x = torch.randn(6, 200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
with one_thread():
    assert torch.get_num_threads() == 1
    (x @ x).sum()
assert (torch.linalg.inv(x) @ x - torch.eye(200, dtype=x.dtype)).abs().max() < 1e-6
assert (torch.linalg.solve(x, x) - torch.eye(200, dtype=x.dtype)).abs().max() < 1e-6
"""
SET_BY_USER = """
import torch
torch.set_num_threads(2)
from deadweight.rewrite.identity_columns import swap_columns
from deadweight.threads import inverse
x = torch.randn(6, 200, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
assert (inverse(x) @ x - torch.eye(200, dtype=x.dtype)).abs().max() < 1e-6
chosen = swap_columns(torch.linalg.qr(x.mT)[0].mT[:, :160], torch.arange(160), torch.ones(200, dtype=torch.bool))
assert len(set(chosen.tolist())) == 160
"""


@pytest.mark.parametrize("program", [AFTERWARDS, SET_BY_USER], ids=["ours", "theirs"])
def test_many_large_matrices_are_inverted_whoever_chose_the_threads(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_one_thread_is_one_and_ends() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    with threads_for(10**9):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (3, 200)])
def test_matrix_by_matrix_is_the_same_as_all_at_once(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moment = x @ x.mT
    values, vectors = eigen(moment)
    assert values.shape == shape and vectors.shape == moment.shape
    torch.testing.assert_close((vectors * values[..., None, :]) @ vectors.mT, moment)
    torch.testing.assert_close(inverse(x) @ x, torch.eye(shape[-1], dtype=x.dtype).expand_as(x), atol=1e-8, rtol=0)


def test_what_fails_in_a_thread_fails_here() -> None:
    with pytest.raises(RuntimeError, match="singular"):
        each(torch.linalg.inv, torch.stack([torch.eye(3), torch.zeros(3, 3)]))


def test_without_anyone_to_tell_openmp_everything_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "controller", lambda: None)
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == before
    values, _ = eigen(torch.diag(torch.tensor([3.0, 1.0])).expand(4, 2, 2))
    assert values.tolist() == [[1.0, 3.0]] * 4
