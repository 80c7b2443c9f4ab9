"""Which claim about a narrow clone corresponds to which claim about the model.

A clone has the modules of the model, with fewer layers and channels. Two claims correspond if they have the same law,
the same role of the parameter (its attribute path without the numbers of layers), and the same position among the
claims of that law about the parameter: a fused parameter consists of the same parts in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from deadweight.claims.claim import Claim, Title
from deadweight.graph.node import Graph

Role = tuple[str, ...]
LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList)


class ClaimIdentity(NamedTuple):
    """What a claim about the model and its counterpart about the clone share."""

    law: Title
    role: Role
    place: int
    among: int  # the number of claims of this law about the parameter: where it differs, positions do not correspond


def roles(module: nn.Module, prefix: str = "", role: Role = ()) -> dict[str, Role]:
    """The role of every parameter, by its name."""
    named = {f"{prefix}{name}": (*role, name) for name, _ in module.named_parameters(recurse=False)}
    if isinstance(module, LISTS):
        named = dict.fromkeys(named, role)
    for name, child in module.named_children():
        named |= roles(child, f"{prefix}{name}.", role if isinstance(module, LISTS) else (*role, name))
    return named


def identities(claims: Sequence[Claim], graph: Graph, known: Mapping[str, Role]) -> dict[int, ClaimIdentity]:
    """The identity of every claim, by `id`; a parameter without a known role is its own role."""
    about: dict[tuple[Title, str], list[Claim]] = defaultdict(list)
    for claim in claims:
        about[claim.law, graph.parameters[claim.node]].append(claim)
    return {
        id(claim): ClaimIdentity(law, known.get(name, (name,)), place, len(alike))
        for (law, name), alike in about.items()
        for place, claim in enumerate(alike)
    }
