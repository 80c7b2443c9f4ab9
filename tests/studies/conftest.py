"""The studies are files that one runs, not a package: they are loaded by their path."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import transformers

FOLDER = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="session")
def study() -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        if (found := sys.modules.get(f"studies.{name}")) is not None:
            return found
        spec = importlib.util.spec_from_file_location(f"studies.{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(FOLDER))  # studies import files that lie beside them, as when they are run as programs
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(FOLDER))
        return module

    return load


@pytest.fixture(scope="session")
def benchmark() -> Callable[[str], ModuleType]:
    """Benchmarks import files that lie beside them, as when they are run as programs."""
    folder = str(FOLDER.parent / "benchmarks")

    def load(name: str) -> ModuleType:
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)

    return load


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that is run as a program quietens transformers; here that would reach other tests."""
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(transformers.logging, name, lambda: None)
