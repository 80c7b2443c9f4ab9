"""The state of a run on disk: weights, optimizer and step, as safetensors; whole or absent, for many processes too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
from deadweight.source.text import printable, reason

STATE = "state"
FILE, ABOUT = "state.safetensors", "state.json"


def save_state(
    out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, main: bool, text: str = ""
) -> None:
    """Every process calls it, one writes: beside the last state first, then in its place. `text`: what was read."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states: Any = get_state_dict(model, optimizer, options=options)
    weights, moments = states
    if not main:
        return
    tensors = {f"model/{name}": value for name, value in weights.items()}
    for name, state in moments["state"].items():
        tensors |= {f"optimizer/{name}/{key}": torch.as_tensor(value) for key, value in state.items()}
    draft, state, old = (out / n for n in (f"{STATE}.draft", STATE, f"{STATE}.old"))
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, draft / FILE)
    (draft / ABOUT).write_text(json.dumps({"step": step, "text": text}), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if state.exists():
        state.rename(old)
    draft.rename(state)
    shutil.rmtree(old, ignore_errors=True)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU of the main process, however they are spread; every process calls it."""
    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(weights)


def saved_step(out: Path) -> int | None:
    """The step of the last state; None if there is none."""
    place = place_of(out)
    return None if place is None else about(place)["step"]


def saved_text(out: Path) -> str | None:
    """The name of the text that the last state was trained on; None if there is no state, or it does not say."""
    place = place_of(out)
    return None if place is None else about(place).get("text") or None


def place_of(out: Path) -> Path | None:
    """Where the last state is; a kill between two renames leaves it under the older name."""
    return next((p for p in (out / STATE, out / f"{STATE}.old") if (p / ABOUT).is_file()), None)


def about(place: Path) -> dict[str, Any]:
    try:
        data = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        if isinstance(data["step"], int):
            return dict(data)
        raise ValueError(f"step = {data['step']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeadweightError(unreadable(place, error)) from error


def load_state(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put the last state into model and optimizer; the step to go on with, 0 if there is none."""
    place = place_of(out)
    if place is None:
        return 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments: Any = get_state_dict(model, optimizer, options=options)[1]
    try:
        stored = load_file(place / FILE)
        weights = {n.removeprefix("model/"): t for n, t in stored.items() if n.startswith("model/")}
        states: Any = {}
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
    return int(about(place)["step"])


def unreadable(place: Path, error: Exception) -> str:
    return f"the checkpoint {printable(place)} cannot be read ({reason(error)}); remove it to begin anew"
