"""Parameters without a derivative: they only decide a choice (which experts, codes or tokens are taken)."""

from __future__ import annotations

from deadweight.graph.node import Graph


def has_no_derivative(graph: Graph, name: str) -> bool:
    """Whether every path from a value to the outputs goes through integers or booleans.

    The gradient of such a value is zero everywhere for this reason alone, so it does not show whether the value
    matters. Comparisons, sorting and casts to integers end the path of a gradient. A detach does not: in the canonical
    graph it is a copy, and the function depends on what is detached.
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
