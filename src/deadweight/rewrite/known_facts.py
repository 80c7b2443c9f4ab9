"""Facts about the weights that earlier rewrites have established."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deadweight.save.facts import Because, Constant, Fact, IdentityBlocks, Passed, ZeroPlaces, module_of


@dataclass(frozen=True)
class SettledFacts:
    """Facts from earlier rewrites, which later ones must keep true. Immutable: `and_also` returns a new value."""

    by_parameter: dict[str, tuple[Fact, ...]] = field(default_factory=dict)

    def and_also(self, facts: Iterable[Fact]) -> SettledFacts:
        more = dict(self.by_parameter)
        for fact in facts:
            if not isinstance(fact, Passed):
                more[fact.parameter] = (*more.get(fact.parameter, ()), fact)
        return SettledFacts(more)

    def is_folded(self, parameter: str) -> bool:
        """Whether a vector was folded into others and is zero: nothing may be written to it."""
        return any(isinstance(f, Constant) and f.because == "folded" for f in self.by_parameter.get(parameter, ()))

    def is_identity(self, parameter: str) -> bool:
        return any(isinstance(f, IdentityBlocks) and f.whole for f in self.by_parameter.get(parameter, ()))

    def dead(self, parameter: str, shape: torch.Size) -> Tensor:
        """Which elements have no effect on the outputs, whatever their value is."""
        result = torch.zeros(shape, dtype=torch.bool)
        for fact in self.by_parameter.get(parameter, ()):
            if isinstance(fact, Constant) and fact.because == "dead":
                result[...] = True
            elif isinstance(fact, ZeroPlaces) and fact.because == "dead":
                result.movedim(fact.axis, 0)[list(fact.places)] = True
        return result

    def lost_columns(self, parameter: str) -> list[int]:
        """Input columns of a weight that were set to zero."""
        return [p for f in self.zeros((parameter,), "lost") for p in f.places]

    def centred_channels(self, module: str) -> tuple[int, ...]:
        """The output channels that were set to zero in a module, in its weight and its bias."""
        parameters = [p for p in self.by_parameter if module_of(p) == module]
        return tuple(place for fact in self.zeros(parameters, "centred") for place in fact.places)

    def zeros(self, parameters: Iterable[str], because: Because) -> list[ZeroPlaces]:
        facts = [f for p in parameters for f in self.by_parameter.get(p, ())]
        return [f for f in facts if isinstance(f, ZeroPlaces) and f.because == because]
