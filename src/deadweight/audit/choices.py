"""Parameters that no derivative reaches: they only decide a choice (which experts, codes or tokens are taken)."""

from __future__ import annotations

from deadweight.graph.node import Graph


def has_no_derivative(graph: Graph, name: str) -> bool:
    """Whether every way from a value to the outputs goes through whole numbers or yes and no.

    Its gradient is zero everywhere, for that reason alone: no gradient says nothing about such a parameter, which may
    well matter. What compares, sorts or rounds to an integer type ends the way of a gradient; a detach does not: in the
    canonical graph it is a copy, and the function depends on what is behind it.
    """
    stack, seen = [name], {name}
    while stack:
        current = stack.pop()
        if current in graph.outputs:
            return False
        for reader in graph.users[current]:
            discrete = reader.dtype is not None and not (reader.dtype.is_floating_point or reader.dtype.is_complex)
            if reader.name not in seen and not discrete:
                seen.add(reader.name)
                stack.append(reader.name)
    return True
