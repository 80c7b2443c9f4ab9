"""A command and the function behind it have the same defaults, so none of them can be changed alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from importlib import import_module

import pytest

from deadweight.cli.compress import KeysName
from deadweight.compress.settings import STRUCTURES, Settings

HOMES = {
    "audit": "audit.run",
    "reduce": "reduce.run",
    "verify": "reduce.verify",
    "evaluate": "evaluate.run",
    "saturation": "saturation.run",
}


def defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    values = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def differing(command: Mapping[str, object], library: Mapping[str, object]) -> set[str]:
    common = command.keys() & library.keys()
    assert common, "no option in common: nothing is compared"
    return {name for name in common if command[name] != library[name]}


@pytest.mark.parametrize("name", HOMES)
def test_a_command_has_the_defaults_of_its_function(name: str) -> None:
    command = getattr(import_module(f"deadweight.cli.{name}"), name)
    function = getattr(import_module(f"deadweight.{HOMES[name]}"), name)
    assert differing(defaults(command), defaults(function)) == set()


def test_compress_has_the_defaults_of_its_settings() -> None:
    command = defaults(import_module("deadweight.cli.compress").compress)
    settings = {f.name: f.default for f in fields(Settings)}
    assert {"windows", "heal_rate", "layout", "method"} <= command.keys() & settings.keys()
    assert differing(command, settings) == set()


def test_a_default_that_differs_is_named() -> None:
    assert differing({"windows": 16, "text": None}, {"windows": 32, "text": None, "inputs": None}) == {"windows"}


def test_the_command_offers_every_structure_of_keys() -> None:
    assert [name.value for name in KeysName] == list(STRUCTURES)
