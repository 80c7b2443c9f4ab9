"""Packages with compiled operators, where these do not fit the torch that is installed."""

from __future__ import annotations

from typing import Any


def skip_fakes(prefix: str) -> None:
    """Let torchvision be imported without its compiled operators: nothing is registered for them."""
    import torch

    register = torch.library.register_fake

    def registered(name: Any, *args: Any, **options: Any) -> Any:
        if isinstance(name, str) and name.startswith(prefix):
            return lambda function: function
        return register(name, *args, **options)

    torch.library.register_fake = registered
