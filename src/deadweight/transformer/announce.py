"""Make our transformer known to the Auto classes of transformers, as soon as these are imported and not before.

`import deadweight` imports neither torch nor transformers. So that `AutoModelForCausalLM.from_pretrained(OUT)` finds
our class all the same, the import of transformers' Auto classes is followed by the import of ours, which registers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTOS = "transformers.models.auto.modeling_auto"
OURS = "deadweight.transformer.auto"


def announce_transformer() -> None:
    """Register now if the Auto classes are imported already, else right after they are."""
    if AUTOS in sys.modules:
        import_module(OURS)
    elif not any(isinstance(finder, AfterAutos) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterAutos())


class AfterAutos(MetaPathFinder):
    """Finds one module as everyone else does, and has its loader register our classes afterwards."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTOS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Registering(spec.loader)
        return spec


class Registering(Loader):
    """Another loader, and our registration after it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        import_module(OURS)
