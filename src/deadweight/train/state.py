"""The state of a run on disk: weights, optimizer and step, as safetensors; complete or absent."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason

STATE = "state"
FILE, ABOUT = "state.safetensors", "state.json"
StateDict: TypeAlias = Any  # nested dicts of tensors, as torch makes them
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class SavedState:
    """The content of state.json: the step, and the name of the text that was read (empty: unknown)."""

    step: int
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.step, int):
            raise TypeError(f"step = {self.step!r}")


def save_state(
    out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, main: bool, text: str = ""
) -> None:
    """Write a new state, then rename it over the last one. Every process calls it, and `main` writes.

    `text` names the text that was read.
    """
    weights, moments = state_of(model, optimizer)
    if not main:
        return
    tensors = {f"model/{name}": value for name, value in weights.items()}
    for name, state in moments["state"].items():
        tensors |= {f"optimizer/{name}/{key}": torch.as_tensor(value) for key, value in state.items()}
    draft, state, old = (out / n for n in (f"{STATE}.draft", STATE, f"{STATE}.old"))
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, draft / FILE)
    (draft / ABOUT).write_text(json.dumps(asdict(SavedState(step, text))), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if state.exists():
        state.rename(old)
    draft.rename(state)
    shutil.rmtree(old, ignore_errors=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[StateDict, StateDict]:
    """Weights and optimizer state, whole, on the CPU; every process calls it."""
    states: StateDict = get_state_dict(model, optimizer, options=WHOLE)
    return states


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU of the main process, also if they are sharded; every process calls it."""
    weights: StateDict = get_model_state_dict(model, options=WHOLE)
    return dict(weights)


def saved_step(out: Path) -> int | None:
    """The step of the last state; None if there is none."""
    place = place_of(out)
    return None if place is None else read_state(place).step


def saved_text(out: Path) -> str | None:
    """The name of the text that the last state was trained on; None if there is no state, or it does not say."""
    place = place_of(out)
    return None if place is None else read_state(place).text or None


def place_of(out: Path) -> Path | None:
    """Where the last state is; a process killed between the two renames leaves it under the older name."""
    return next((p for p in (out / STATE, out / f"{STATE}.old") if (p / ABOUT).is_file()), None)


def read_state(place: Path) -> SavedState:
    try:
        return SavedState(**json.loads((place / ABOUT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DeadweightError(unreadable(place, error)) from error


def load_state(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put the last state into model and optimizer, and return its step; 0 if there is none."""
    place = place_of(out)
    if place is None:
        return 0
    moments = state_of(model, optimizer)[1]
    try:
        stored = load_file(place / FILE)
        weights = {n.removeprefix("model/"): t for n, t in stored.items() if n.startswith("model/")}
        states: StateDict = {}
        for name, value in stored.items():
            if name.startswith("optimizer/"):
                parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
                states.setdefault(parameter, {})[key] = value
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict={**moments, "state": states},
            options=StateDictOptions(full_state_dict=True),
        )
    except Exception as error:  # a damaged file, or one of another model
        raise DeadweightError(unreadable(place, error)) from error
    return read_state(place).step


def unreadable(place: Path, error: Exception) -> str:
    return f"the checkpoint {printable(place)} cannot be read ({reason(error)}); remove it to start again"
