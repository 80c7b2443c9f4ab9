"""How many threads compute: one for many small operations, one for each of many small matrices.

`torch.set_num_threads` is not used: from then on, for the rest of the process, MKL's LU factorisation of several
matrices at once may hang or be wrong (pytorch issues 141358 and 142815, torch 2.5 to 2.13). OpenMP is told instead, on
which torch and MKL rely; where nobody can tell it, the number stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # everything works without, only slower
    ThreadpoolController = None

SMALL = 20_000_000  # parameters of a model whose numbers one thread computes faster than several
TOGETHER = 128  # rows of matrices that can be factorised at once; more may meet the error above if a user set threads
T = TypeVar("T")


@functools.cache
def controller() -> Any:
    """Of the libraries of OpenMP that are loaded: torch's is among them."""
    return None if ThreadpoolController is None else ThreadpoolController().select(user_api="openmp")


def limit(threads: int) -> Any:
    """So many for the thread that calls; the result's `restore_original_limits` undoes it."""
    return None if controller() is None else controller().limit(limits=threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of small operations: waking a second thread for each costs more than it gives."""
    limited = limit(1)
    try:
        yield
    finally:
        if limited is not None:
            limited.restore_original_limits()


def workers() -> int:
    """How many jobs to do side by side, each on one thread: as many as OpenMP has here, one if it cannot be told."""
    return torch.get_num_threads() if controller() is not None else 1


def threads_for(parameters: int) -> AbstractContextManager[None]:
    """One thread for a small model, all of them for a large one."""
    return one_thread() if parameters < SMALL else nullcontext()


def each(job: Callable[[Tensor], T], matrices: Iterable[Tensor]) -> list[T]:
    """The same job for many matrices, as many at a time as there are threads."""
    todo, threads = list(matrices), torch.get_num_threads()
    if threads == 1 or len(todo) == 1 or controller() is None:
        with one_thread():
            return [job(x) for x in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), initializer=limit, initargs=(1,)) as pool:
        return list(pool.map(job, todo))


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of (…, d, d), symmetric or Hermitian."""
    if matrix.device.type != "cpu":
        return torch.linalg.eigh(matrix)
    pairs = each(torch.linalg.eigh, matrix.reshape(-1, *matrix.shape[-2:]))
    values, vectors = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return values.view(matrix.shape[:-1]), vectors.view(matrix.shape)


def inverse(matrix: Tensor) -> Tensor:
    """The inverses of (…, d, d)."""
    if matrix.dim() == 2 or matrix.shape[-1] <= TOGETHER or matrix.device.type != "cpu":
        return torch.linalg.inv(matrix)
    return torch.stack(each(torch.linalg.inv, matrix.reshape(-1, *matrix.shape[-2:]))).view(matrix.shape)
