"""Rows of attention, a few at a time: what each says about how far the softmax is from saturation.

A row belongs to a length L if it sees more than ¾L and at most L keys. Of every window the same rows are looked at,
drawn once for each length. Their logits are formed again from queries and keys in float64, for one window, one
attention and one length at a time, so that no table of all rows by all keys ever exists; of a row seven numbers are
kept.

Models park weight that they have no use for on the first key, a *sink*, so the norm is taken twice: of the row, and of
what the softmax makes of its other keys alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deadweight.compress.observe import Attend
from deadweight.errors import DeadweightError
from deadweight.saturation.softmax_norm import softmax_norm
from deadweight.source.kinds import Keywords, Leaf

KEPT = ("log_length", "log_norm", "log_norm_rest", "norm", "logit_range", "entropy", "largest")
LEAST = 2.0**-24  # the last place of a weight in float32: to its logarithm a norm below this is this much


def drawn_places(length: int, rows: int, seed: int, *, causal: bool) -> Tensor:
    """The query positions that are looked at for a length: the last one, and others by chance.

    In a causal window position n − 1 sees n keys, so those of the last quarter belong to the length.
    """
    first = 3 * length // 4 if causal else 0
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    others = first + torch.randperm(length - 1 - first, generator=generator)[: rows - 1]
    return torch.cat([others.sort().values, torch.tensor([length - 1])])


class Causality:
    """An observer that finds out whether no attention of a model ever sees a later token."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.causal = True

    def __call__(self, path: str, query: Tensor, key: Tensor, value: Tensor, attend: Attend, how: Keywords) -> Tensor:
        self.paths += [] if path in self.paths else [path]
        places = torch.arange(query.shape[2], device=query.device)
        seen = visible(how, places, key.shape[2])
        later = torch.arange(key.shape[2], device=query.device) > places[:, None]
        self.causal &= query.shape[2] == key.shape[2] and not bool((seen & later).any())
        return attend(query, key, value)


class RowObserver:
    """An observer that keeps `KEPT` of the rows at the places of each length: by attention and length."""

    def __init__(self, places: Mapping[int, Tensor], *, causal: bool) -> None:
        self.places, self.causal = places, causal
        self.found: dict[str, dict[int, list[Tensor]]] = {}  # windows × heads × rows × KEPT

    def __call__(self, path: str, query: Tensor, key: Tensor, value: Tensor, attend: Attend, how: Keywords) -> Tensor:
        if not bool(torch.isfinite(query).all() and torch.isfinite(key).all()):
            raise DeadweightError(
                f"{path} has queries or keys that are not finite on this text; expected a model that works: nothing "
                "can be measured on this one"
            )
        mine = self.found.setdefault(path, {length: [] for length in self.places})
        for length, places in self.places.items():
            keys = key[:, :, :length] if self.causal else key  # no row of this length sees more
            seen = visible(how, places.to(key.device), keys.shape[2])
            for window in range(query.shape[0]):
                one = slice(window, window + 1)
                logits = scores(query[one][:, :, places], keys[one], how, places)
                shown = seen if seen.shape[0] == 1 else seen[one]
                mine[length].append(kept(logits, shown, length).float().cpu())
        return attend(query, key, value)


def visible(how: Mapping[str, Leaf], places: Tensor, n_keys: int) -> Bool[Tensor, "b h rows keys"]:
    """Which keys the queries at these places see; batch and heads may be 1 where all see the same."""
    mask: Tensor | None = how["mask"]
    if mask is not None:
        rows = mask[:, :, places] if mask.shape[2] > 1 else mask.expand(-1, -1, len(places), -1)
        rows = rows[..., :n_keys]
        return rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
    keys = torch.arange(n_keys, device=places.device)
    seen = keys <= places[:, None] if how["causal"] else (keys >= 0).expand(len(places), -1)
    return seen[None, None]


def scores(
    query: Float[Tensor, "b h rows d"], key: Float[Tensor, "b g keys d"], how: Mapping[str, Leaf], places: Tensor
) -> Float[Tensor, "b h rows keys"]:
    """What goes into the softmax, in float64, hidden keys included."""
    shared = query.double().unflatten(1, (key.shape[1], -1))  # the query heads of a key head side by side
    result = torch.einsum("bgmrd,bgkd->bgmrk", shared, key.double()).flatten(1, 2) * how["scaling"]
    if how["softcap"] is not None:
        result = how["softcap"] * torch.tanh(result / how["softcap"])
    mask: Tensor | None = how["mask"]
    if mask is None or mask.dtype == torch.bool:
        return result
    rows = mask[:, :, places] if mask.shape[2] > 1 else mask
    return result + rows[..., : key.shape[2]].double()


def kept(logits: Float[Tensor, "b h rows keys"], seen: Tensor, length: int) -> Float[Tensor, "b h rows kept"]:
    """`KEPT` of every row; nothing (NaN) of rows that do not belong to the length."""
    seen = seen.expand(logits.shape)
    n = seen.sum(-1)
    low = logits.masked_fill(~seen, torch.inf).amin(-1)
    logits = logits.masked_fill(~seen, -torch.inf)
    p = logits.softmax(-1)
    norm, rest = softmax_norm(p.nan_to_num()), softmax_norm(logits[..., 1:].softmax(-1).nan_to_num())
    columns = [
        n.double().log(),
        norm.clamp(min=LEAST).log(),
        rest.clamp(min=LEAST).log(),
        norm,
        logits.amax(-1) - low,
        -torch.xlogy(p, p).sum(-1),
        p.amax(-1),
    ]
    belongs = (4 * n > 3 * length) & (n <= length)
    return torch.stack(columns, -1).masked_fill(~belongs[..., None], torch.nan)
