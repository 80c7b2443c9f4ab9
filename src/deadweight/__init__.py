"""deadweight finds the parameters of a transformer that cannot matter, and proves it.

    import deadweight
    result = deadweight.audit(model, inputs)    # every finding, with its proof

Importing this package imports neither torch nor transformers; the first call that needs them does. Models that
`deadweight train` wrote are known to transformers' Auto classes from then on.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from deadweight.transformer.announce import announce_transformer
from deadweight.version import __version__

__all__ = [
    "Audit",
    "Completeness",
    "DeadweightError",
    "Finding",
    "Reduction",
    "Unknown",
    "Verification",
    "__version__",
    "allocate",
    "audit",
    "compress",
    "evaluate",
    "load",
    "reduce",
    "saturation",
    "verify",
]

_HOME = {
    "Audit": "deadweight.audit.result",
    "Completeness": "deadweight.audit.result",
    "Finding": "deadweight.audit.result",
    "Unknown": "deadweight.audit.result",
    "DeadweightError": "deadweight.errors",
    "Reduction": "deadweight.reduce.result",
    "Verification": "deadweight.reduce.error_limits",
    "load": "deadweight.save.load",
    "verify": "deadweight.reduce.verify",
}  # public name -> the module that defines it, imported on first use


class _Stage(ModuleType):
    """A stage package that can be called: `deadweight.audit(…)` is `deadweight.audit.run.audit(…)`.

    The stage and its main function share one name. Importing any submodule binds that name to the package again,
    so a function put there would be lost; a package that is callable means both, whatever was imported first.
    """

    def __call__(self, *args: object, **options: object) -> object:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"{self.__name__}.run"), name)(*args, **options)


for _name in ("allocate", "audit", "compress", "evaluate", "reduce", "saturation"):
    import_module(f"deadweight.{_name}").__class__ = _Stage

announce_transformer()

if TYPE_CHECKING:
    from deadweight.allocate.run import allocate
    from deadweight.audit.result import Audit, Completeness, Finding, Unknown
    from deadweight.audit.run import audit
    from deadweight.compress.run import compress
    from deadweight.errors import DeadweightError
    from deadweight.evaluate.run import evaluate
    from deadweight.reduce.error_limits import Verification
    from deadweight.reduce.result import Reduction
    from deadweight.reduce.run import reduce
    from deadweight.reduce.verify import verify
    from deadweight.saturation.run import saturation
    from deadweight.save.load import load


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'deadweight' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
