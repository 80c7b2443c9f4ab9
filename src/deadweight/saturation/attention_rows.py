"""Rows of attention, a few at a time, and the numbers that show how far the softmax of each is saturated.

A row belongs to a length L if it sees more than ¾L and at most L keys. The rows are sampled once for each length and
are the same in every window. Their logits are computed again from queries and keys in float64, for one window, one
attention and one length at a time, so that the full matrix of rows by keys never exists. Seven numbers are kept of a
row.

Models use the first key as an attention *sink*, so the norm is computed twice: of the whole row, and of the softmax
over all keys but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deadweight.compress.attention_calls import AttentionCall
from deadweight.errors import DeadweightError
from deadweight.saturation.softmax_norm import softmax_norm
from deadweight.slim.attention import AttentionOptions

LEAST = 2.0**-24  # the resolution of a weight in float32: smaller norms are replaced by it before the logarithm


class Column(IntEnum):
    """The numbers that are kept of a row, by their place in the last dimension."""

    log_length = 0
    log_norm = 1
    log_norm_rest = 2  # of the softmax over all keys but the first
    norm = 3
    logit_range = 4
    entropy = 5
    largest = 6


def sample_positions(length: int, rows: int, seed: int, *, causal: bool) -> Tensor:
    """The query positions that are sampled for a length: the last one, and others at random.

    In a causal window position n − 1 sees n keys, so the positions of the last quarter belong to the length.
    """
    first = 3 * length // 4 if causal else 0
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    others = first + torch.randperm(length - 1 - first, generator=generator)[: rows - 1]
    return torch.cat([others.sort().values, torch.tensor([length - 1])])


class Causality:
    """An observer that checks whether every attention of a model is causal."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.causal = True

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        self.paths += [] if path in self.paths else [path]
        places = torch.arange(query.shape[2], device=query.device)
        seen = visible(call.options, places, key.shape[2])
        later = torch.arange(key.shape[2], device=query.device) > places[:, None]
        self.causal &= query.shape[2] == key.shape[2] and not bool((seen & later).any())
        return call.attend(query, key, value)


class RowObserver:
    """An observer that keeps the numbers of `Column` of the sampled rows, by attention and length."""

    def __init__(self, places: Mapping[int, Tensor], *, causal: bool) -> None:
        self.places, self.causal = places, causal
        self.rows: dict[str, dict[int, list[Tensor]]] = {}  # windows × heads × rows × columns

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        if not bool(torch.isfinite(query).all() and torch.isfinite(key).all()):
            raise DeadweightError(
                f"{path} has NaN or infinity in its queries or keys on this text; expected a model with finite "
                "activations"
            )
        scoring, mine = call.options, self.rows.setdefault(path, {length: [] for length in self.places})
        for length, places in self.places.items():
            keys = key[:, :, :length] if self.causal else key  # no row of this length sees more
            seen = visible(scoring, places.to(key.device), keys.shape[2])
            for window in range(query.shape[0]):
                one = slice(window, window + 1)
                logits = scores(query[one][:, :, places], keys[one], scoring, places)
                shown = seen if seen.shape[0] == 1 else seen[one]
                mine[length].append(numbers_of(logits, shown, length).float().cpu())
        return call.attend(query, key, value)


def visible(scoring: AttentionOptions, places: Tensor, n_keys: int) -> Bool[Tensor, "b h rows keys"]:
    """Which keys the queries at these positions see; batch and heads may be 1 where all see the same."""
    mask = scoring.mask
    if mask is not None:
        rows = mask[:, :, places] if mask.shape[2] > 1 else mask.expand(-1, -1, len(places), -1)
        rows = rows[..., :n_keys]
        return rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
    keys = torch.arange(n_keys, device=places.device)
    seen = keys <= places[:, None] if scoring.causal else (keys >= 0).expand(len(places), -1)
    return seen[None, None]


def scores(
    query: Float[Tensor, "b h rows d"], key: Float[Tensor, "b g keys d"], scoring: AttentionOptions, places: Tensor
) -> Float[Tensor, "b h rows keys"]:
    """The logits of the softmax, in float64, masked keys included."""
    shared = query.double().unflatten(1, (key.shape[1], -1))  # the query heads of a key head side by side
    result = torch.einsum("bgmrd,bgkd->bgmrk", shared, key.double()).flatten(1, 2) * scoring.scale_of(query)
    if scoring.softcap is not None:
        result = scoring.softcap * torch.tanh(result / scoring.softcap)
    mask = scoring.mask
    if mask is None or mask.dtype == torch.bool:
        return result
    rows = mask[:, :, places] if mask.shape[2] > 1 else mask
    return result + rows[..., : key.shape[2]].double()


def numbers_of(logits: Float[Tensor, "b h rows keys"], seen: Tensor, length: int) -> Float[Tensor, "b h rows columns"]:
    """The numbers of `Column` of every row; NaN for rows that do not belong to the length."""
    seen = seen.expand(logits.shape)
    n = seen.sum(-1)
    low = logits.masked_fill(~seen, torch.inf).amin(-1)
    logits = logits.masked_fill(~seen, -torch.inf)
    p = logits.softmax(-1)
    norm, rest = softmax_norm(p.nan_to_num()), softmax_norm(logits[..., 1:].softmax(-1).nan_to_num())
    columns = {
        Column.log_length: n.double().log(),
        Column.log_norm: norm.clamp(min=LEAST).log(),
        Column.log_norm_rest: rest.clamp(min=LEAST).log(),
        Column.norm: norm,
        Column.logit_range: logits.amax(-1) - low,
        Column.entropy: -torch.xlogy(p, p).sum(-1),
        Column.largest: p.amax(-1),
    }
    belongs = (4 * n > 3 * length) & (n <= length)
    return torch.stack([columns[column] for column in Column], -1).masked_fill(~belongs[..., None], torch.nan)
