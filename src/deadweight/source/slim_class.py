"""The class of a slim checkpoint: the original's, built with the layers and the attention that its config describes."""

from __future__ import annotations

from typing import Any

from deadweight.source.slim_attention import install_attention
from deadweight.source.slim_modeling import install


def slim_class(base: type[Any]) -> type[Any]:
    """The same model class, built with the layers that its config describes."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        install(self, config.deadweight)
        if "attention" in config.deadweight:
            install_attention(self, config.deadweight["attention"])

    mine = {"__init__": __init__, "__module__": __name__, "_auto_class": None}  # this file alone is not its code
    return type(f"Slim{base.__name__}", (base,), mine)
