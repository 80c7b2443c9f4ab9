"""What earlier rewrites have said of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deadweight.save.facts import Because, Constant, Fact, IdentityBlocks, Passed, ZeroPlaces, module_of


@dataclass(frozen=True)
class SettledFacts:
    """What earlier rewrites have settled, and later ones must respect. A value: adding facts makes another."""

    by_parameter: dict[str, tuple[Fact, ...]] = field(default_factory=dict)

    def and_also(self, facts: Iterable[Fact]) -> SettledFacts:
        more = dict(self.by_parameter)
        for fact in facts:
            if not isinstance(fact, Passed):
                more[fact.parameter] = (*more.get(fact.parameter, ()), fact)
        return SettledFacts(more)

    def is_folded(self, parameter: str) -> bool:
        """Whether a vector has been folded away: nothing may fill it again."""
        return any(isinstance(f, Constant) and f.because == "folded" for f in self.by_parameter.get(parameter, ()))

    def is_identity(self, parameter: str) -> bool:
        return any(isinstance(f, IdentityBlocks) and f.whole for f in self.by_parameter.get(parameter, ()))

    def dead(self, parameter: str, shape: torch.Size) -> Tensor:
        """Which elements have no effect at all, whatever is written there."""
        result = torch.zeros(shape, dtype=torch.bool)
        for fact in self.by_parameter.get(parameter, ()):
            if isinstance(fact, Constant) and fact.because == "dead":
                result[...] = True
            elif isinstance(fact, ZeroPlaces) and fact.because == "dead":
                result.movedim(fact.axis, 0)[list(fact.places)] = True
        return result

    def lost_columns(self, parameter: str) -> list[int]:
        """Input columns of a weight that were emptied."""
        return [p for f in self.zeros((parameter,), "lost") for p in f.places]

    def centred_channel(self, module: str) -> int | None:
        """The output channel that was emptied in a module: its weight and its bias have the same."""
        parameters = [p for p in self.by_parameter if module_of(p) == module]
        return next((f.places[0] for f in self.zeros(parameters, "centred")), None)

    def zeros(self, parameters: Iterable[str], because: Because) -> list[ZeroPlaces]:
        facts = [f for p in parameters for f in self.by_parameter.get(p, ())]
        return [f for f in facts if isinstance(f, ZeroPlaces) and f.because == because]
