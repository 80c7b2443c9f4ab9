"""Example inputs for a module that comes without any: made from the shapes of its first layers."""

from __future__ import annotations

import inspect
from itertools import islice

from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.examples import first_that_runs, has_forward
from deadweight.source.inputs import Inputs
from deadweight.source.module_copies import share_tensors
from deadweight.source.printable import printable
from deadweight.source.trial_run import reason_and_line
from deadweight.source.written_inputs import WrittenInputs, first_tensors, in_precision_of
from deadweight.source.written_shapes import WrittenTensor

TRIES = 12  # of the inputs that the first layers take
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
HOW = "on the command line, inputs= in Python, or (module, inputs) returned from the callable"


def guess_inputs(module: nn.Module, name: str) -> tuple[Inputs, str]:
    """Inputs on which the module runs, and a note that says how they were chosen; raises where none is found."""
    n_arguments = required_arguments(module)
    failure: tuple[str, Exception] | None = None
    for layer, tensor in islice(first_tensors(module), TRIES) if n_arguments else ():
        inputs = in_precision_of(module, WrittenInputs((tensor,) * n_arguments).make(2))
        _, error = first_that_runs(share_tensors(module), [inputs])
        if error is None:
            return inputs, describe_guess(layer, tensor)
        failure = failure or (tensor.written, error)
    why = f" (the first that was tried, {failure[0]}: {reason_and_line(failure[1])})" if failure is not None else ""
    example = failure[0] if failure is not None else "2x64:int"
    raise DeadweightError(
        f"{printable(name)} is a {type(module).__name__} without example inputs, and it runs on none that its first "
        f"layers suggest{why}; expected inputs: --inputs {example} with the right sizes {HOW}"
    )


def describe_forward(module: nn.Module) -> str:
    """What a module's forward takes: its arguments, and what its first layer reads, written as after --inputs."""
    needed = [a for a in inspect.signature(module.forward).parameters.values() if a.default is a.empty]
    names = [STARS.get(a.kind, "") + a.name for a in needed]
    first = next(first_tensors(module), None)
    hint = f"; its layer {printable(first[0])} reads --inputs {first[1].written}" if first is not None else ""
    return f"inputs that forward({printable(', '.join(names))}) takes{hint}"


def required_arguments(module: nn.Module) -> int:
    """How many positional arguments forward needs."""
    if not has_forward(module):
        return 0
    arguments = inspect.signature(module.forward).parameters.values()
    return sum(a.kind in POSITIONAL and a.default is a.empty for a in arguments)


def describe_guess(layer: str, tensor: WrittenTensor) -> str:
    kind = f"integers below {tensor.high}" if tensor.kind == "int" else "random floats"
    return (
        f"no example inputs were given: {kind} of shape {' × '.join(map(str, tensor.shape))} were taken, as "
        f"{printable(layer)} reads them; with --inputs you choose them yourself (these: --inputs {tensor.written})"
    )
