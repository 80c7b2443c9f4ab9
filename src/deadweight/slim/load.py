"""The class of a slim checkpoint: the original's, built with the layers and the attention that its config describes."""

from __future__ import annotations

from typing import Any

from .attention import install_attention
from .format import SlimSpec
from .layers import install


def is_slim(config: Any) -> bool:
    return isinstance(getattr(config, "deadweight", None), dict)


def slim_class(base: type[Any]) -> type[Any]:
    """The same model class, built with the layers that its config describes."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        slim = SlimSpec.from_json(config.deadweight)
        install(self, slim)
        if slim.attention is not None:
            install_attention(self, slim.attention)

    mine = {"__init__": __init__, "__module__": __name__, "_auto_class": None}  # this file alone is not its code
    return type(f"Slim{base.__name__}", (base,), mine)
