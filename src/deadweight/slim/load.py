"""The class of a slim checkpoint: the original's, built with the layers and the attention that its config describes."""

from __future__ import annotations

from typing import Any

from .format import SlimSpec
from .heads import install_heads
from .install_caches import install_caches
from .layers import install


def is_slim(config: Any) -> bool:
    return isinstance(getattr(config, "deadweight", None), dict)


def slim_class(base: type[Any]) -> type[Any]:
    """The same model class, built with the layers that its config describes; one for each original."""
    return CLASSES[base] if base in CLASSES else CLASSES.setdefault(base, new_slim_class(base))


CLASSES: dict[type[Any], type[Any]] = {}


def new_slim_class(base: type[Any]) -> type[Any]:

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        slim = SlimSpec.from_json(config.deadweight)
        install(self, slim)
        if slim.heads:
            install_heads(self, slim.heads)
        if slim.caches:
            install_caches(self, slim.caches)

    def __reduce__(self: Any) -> tuple[Any, ...]:  # a class that is made here cannot be imported by name
        return without_state, (base,), self.__dict__

    mine = {"__init__": __init__, "__reduce__": __reduce__, "__module__": __name__}
    mine["_auto_class"] = None  # this file alone is not its code
    return type(f"Slim{base.__name__}", (base,), mine)


def without_state(base: type[Any]) -> Any:
    """A slim model without state, for unpickling."""
    cls: Any = slim_class(base)
    return cls.__new__(cls)
