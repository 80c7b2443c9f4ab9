"""The number of threads: one for many small operations, one per matrix for many small matrices.

`torch.set_num_threads` is not used: after a call, MKL's batched LU factorisation may hang or give wrong results for the
rest of the process (pytorch issues 141358 and 142815, torch 2.5 to 2.13). Instead the limit is set in OpenMP, which
torch and MKL use. Without threadpoolctl the number of threads stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # it only makes things faster
    ThreadpoolController = None

SMALL = 20_000_000  # parameters: below, one thread is faster than several
TOGETHER = 128  # rows: larger matrices are not factorised in a batch, since a user may have called set_num_threads
S = TypeVar("S")
T = TypeVar("T")


class Limiter(Protocol):
    """A limit of the number of threads that can be lifted."""

    def restore_original_limits(self) -> None: ...


@functools.cache
def controller() -> ThreadpoolController | None:
    """The thread counts of all loaded OpenMP runtimes; torch's is one of them."""
    return None if ThreadpoolController is None else ThreadpoolController().select(user_api="openmp")


def limit(threads: int) -> Limiter | None:
    """Limit the threads of OpenMP for the calling thread; `restore_original_limits` of the result undoes it."""
    openmp = controller()
    return None if openmp is None else openmp.limit(limits=threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside the block. It is faster for thousands of small operations than waking a second one for each."""
    limited = limit(1)
    try:
        yield
    finally:
        if limited is not None:
            limited.restore_original_limits()


def workers() -> int:
    """How many jobs to run in parallel, each on one thread: the threads of OpenMP, or one if they cannot be limited."""
    return torch.get_num_threads() if controller() is not None else 1


def threads_for(parameters: int) -> AbstractContextManager[None]:
    """One thread for a small model, all threads for a large one."""
    return one_thread() if parameters < SMALL else nullcontext()


def each(job: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """The same function of many items, as many at a time as there are threads, with one thread for each."""
    todo, threads = list(items), torch.get_num_threads()
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
    """The inverse of each matrix in (…, d, d)."""
    if matrix.dim() == 2 or matrix.shape[-1] <= TOGETHER or matrix.device.type != "cpu":
        return torch.linalg.inv(matrix)
    return torch.stack(each(torch.linalg.inv, matrix.reshape(-1, *matrix.shape[-2:]))).view(matrix.shape)
