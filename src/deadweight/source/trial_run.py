"""One run of a model on its example inputs before the real work: what fails, and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason
from deadweight.source.private_api import OpOverload, forward_pre_hooks, schema
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
OF_TORCH = set(vars(nn.Module()))


class WrittenTo(BaseException):
    """A forward is about to change one of the user's tensors. No `except Exception` of a model may catch it."""


class Untouched(TorchDispatchMode):
    """Raises WrittenTo before an operation writes into these tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages = {storage(t) for t in tensors if not t.is_meta} - {None}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        if schema(func).is_mutable and any(map(self.is_users, written_arguments(func, args, kwargs or {}))):
            raise WrittenTo(str(func))
        return func(*args, **(kwargs or {}))

    def is_users(self, leaf: Leaf) -> bool:
        return isinstance(leaf, Tensor) and leaf.numel() > 0 and storage(leaf) in self.storages


def storage(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def written_arguments(func: OpOverload, args: Arguments, kwargs: Keywords) -> list[Leaf]:
    """The arguments that an operation writes to."""
    names = [argument.name for argument in schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    marked = [a.name for a in schema(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    return pytree.tree_leaves([given.get(name) for name in marked])


Held = dict[str, tuple[int, ...]]  # attribute to the identities of the tensors in it


def held_tensors(module: nn.Module) -> Held:
    """Attributes of all modules that hold tensors, directly or in containers; not those that a hook recomputes."""
    result: Held = {}
    for path, owner in module.named_modules():
        computed = {getattr(hook, "name", None) for hook in forward_pre_hooks(owner)}
        for name, value in vars(owner).items():
            if name in OF_TORCH or name in computed:
                continue
            leaves = [id(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            if leaves:
                result[f"{path}.{name}".lstrip(".")] = tuple(leaves)
    return result


def kept_note(before: Held, after: Held) -> tuple[str, ...]:
    """A note, if a run of the model stored tensors in it."""
    kept = [name for name, tensors in after.items() if before.get(name) != tensors]
    if not kept:
        return ()
    more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
    names = printable(", ".join(kept[:3]) + more)
    return (f"forward stores tensors in the module ({names}): findings are about the outputs of one call",)


def run_or_refuse(name: str, run: Callable[[], Leaf], expected: str = "inputs that its forward takes") -> Leaf:
    """The result of a run; raises DeadweightError with the exception and the line of code that raised it."""
    try:
        return run()
    except Exception as error:
        raise DeadweightError(
            f"{printable(name)} does not run on its example inputs ({reason_and_line(error)}); expected {expected}"
        ) from error


@contextmanager
def refusing_failures(name: str) -> Iterator[None]:
    """Turn what a model's own code raises into one line that names the model; too little memory stays what it is."""
    try:
        yield
    except DeadweightError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DeadweightError(
            f"{printable(name)} does not run ({reason_and_line(error)}); expected a model that its own class can run: "
            "check its config"
        ) from error


def reason_and_line(error: BaseException) -> str:
    """Why something failed, and where in the user's code, if it failed there."""
    line = raising_line(error)
    return f"{reason(error)}, at {line}" if line else reason(error)


def raising_line(error: BaseException) -> str:
    """file:line of the user's code that failed, or of torch's if there is none; empty if only ours ran."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    own = [f for f in frames if not f.filename.startswith((TORCH, "<"))]
    last = (own or frames)[-1] if frames else None
    return f"{printable(Path(last.filename).name)}:{last.lineno}" if last is not None else ""
