"""Models that are code: a live module, or package.module:callable."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from deadweight.errors import DeadweightError
from deadweight.source.examples import has_forward
from deadweight.source.hugging_face import Built, eager
from deadweight.source.hugging_face_config import SPEC, refuse_code
from deadweight.source.module_copies import share_tensors
from deadweight.source.printable import printable, reason
from deadweight.source.trial_run import reason_and_line
from deadweight.source.type_aliases import ExampleInputs, Leaf

QUANTISED = re.compile(r"torch\.ao\.nn\.(intrinsic\.)?quantized\b")  # the folders of torch's quantised layers


def looks_like(spec: str) -> bool:
    """Whether this is written as package.module:callable."""
    return SPEC.fullmatch(spec) is not None


@dataclass(frozen=True)
class MadeModule:
    """What a callable returned, kept because a second call may return other weights."""

    name: str  # package.module:callable
    module: nn.Module
    inputs: ExampleInputs = None

    def __str__(self) -> str:
        return self.name

    def built(self) -> Built:
        return from_module(self.module, name=self.name, inputs=self.inputs)


def from_spec(spec: str) -> Built:
    """Import the callable, with the working directory on the path, and call it."""
    return make_module(spec).built()


def make_module(spec: str) -> MadeModule:
    """Call the callable once; what it returns can be opened often."""
    made = _call(spec, find_callable(spec))
    if inspect.iscoroutine(made):
        made.close()  # otherwise Python warns that it was never awaited
    module, inputs = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise DeadweightError(
            f"{printable(spec)} returned {_kind(made)}; expected an nn.Module, or a pair (nn.Module, example inputs)"
        )
    return MadeModule(spec, module, inputs)


def from_module(module: nn.Module, *, name: str = "", inputs: ExampleInputs = None) -> Built:
    """A copy that shares the parameters: switching it to eager attention and eval mode does not change the user's."""
    module = _eager(module)
    _refuse_unreadable(module, printable(name or type(module).__name__))
    clone = share_tensors(module)
    config = getattr(clone, "config", None) if hasattr(clone, "main_input_name") else None
    if config is not None:
        eager(clone)
    return Built(name or type(module).__name__, clone, config, (), inputs)


def _eager(module: nn.Module) -> nn.Module:
    """The module that was passed to torch.compile."""
    while type(module).__name__ == "OptimizedModule":  # by name: importing the class takes a second
        module = module.get_submodule("_orig_mod")
    return module


def _refuse_unreadable(module: nn.Module, name: str) -> None:
    """Raise for a module without forward, or with layers whose numbers cannot be followed."""
    if not has_forward(module):
        raise DeadweightError(f"{name} is a {type(module).__name__} without forward(); expected a module that can run")
    for path, layer in module.named_modules():
        what = f"{name} is" if not path else f"{printable(path)} of {name} is"
        if isinstance(layer, torch.jit.ScriptModule):
            raise DeadweightError(
                f"{what} a TorchScript module, which cannot be traced; expected the eager module that it was made from"
            )
        if QUANTISED.match(type(layer).__module__):
            raise DeadweightError(
                f"{what} a quantised {type(layer).__name__}; expected the module before quantisation, with parameters "
                "that are floats"
            )
    for tensor, value in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
            raise DeadweightError(
                f"{printable(tensor)} of {name} has no shape yet; expected an initialised module: run a lazy module "
                "forward once"
            )


def find_callable(spec: str) -> Leaf:
    """What package.module:name names, with the working directory on the path."""
    place, _, attribute = spec.partition(":")
    if place.endswith(".py") and Path(place).is_file():
        refuse_code(spec)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        result: Leaf = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise DeadweightError(
            f"{printable(place)} cannot be imported ({_import_failure(error)}); expected package.module:callable, "
            f"importable from {printable(here)}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(result, name):
            raise DeadweightError(
                f"{printable(place)} has no {printable(attribute)}; expected a callable of that name"
                f"{_closest(name, dir(result))}"
            )
        result = getattr(result, name)
    return result


def _import_failure(error: BaseException) -> str:
    """Why an import failed, with the line of the user's code that raised; a missing module says it by its name."""
    if isinstance(error, (ModuleNotFoundError, SyntaxError)):
        return reason(error)
    return reason_and_line(error)


def _closest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {printable(close[0])}?" if close else ""


def _call(spec: str, target: Leaf) -> Leaf:
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise DeadweightError(f"{printable(spec)} is {_kind(target)}; expected a callable that returns an nn.Module")
    try:
        return target()
    except (Exception, SystemExit) as error:  # the user's code
        raise DeadweightError(
            f"{printable(spec)} failed ({reason_and_line(error)}); expected a callable that returns an nn.Module "
            "and takes no arguments"
        ) from error


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    inside = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}{inside}"
