"""The maps from codes to keys and values, fitted to the codes of the coded model itself.

The maps of `cache_bases.py` follow from covariances, as if coordinates were normal and rounding errors independent of
each other. Neither holds: a token with an outlier has a scale of its own, and one-bit codes know only a sign. Let c be
the codes of a token beside a 1, and e what decoding misses of its keys and values. Δ = E[e cᵀ] E[c cᵀ]⁻¹ added to the
maps gives the least squared error of all linear maps, of every number and so of every weighted sum of them: whatever
the loss weighs, none is better. Nothing is added to what is cached. Codes are those of a model all of whose attentions
are coded, so that a layer is fitted to what the layers before it pass on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from deadweight.compress.calibration import Batch
from deadweight.compress.judge import run_model
from deadweight.compress.measure import second
from deadweight.slim.coder import Coder

FITTED = 16384  # tokens on which maps are fitted, at most
RIDGE = 1e-3  # of the mean square of every code: what it adds is shrunk by this where it says little


@dataclass
class CodeMoments:
    """Sums over tokens, for every set of heads: of products of codes, and of codes with what decoding misses."""

    codes: Tensor | float = 0.0  # (sets, n, n); a 1 comes first, then codes of keys, then of values
    missed: Tensor | float = 0.0  # (sets, n, numbers of keys and of values)

    def add(self, coder: Coder, key: Tensor, value: Tensor, positions: Tensor) -> None:
        states = coder.centred(key, value, positions)
        codes = coder.rounded(*states)
        read = coder.centred_of(*codes)
        missed = torch.cat([a - b for a, b in zip(states, read, strict=True)], -1)[:, :, coder.spec.first :]
        vectors = torch.cat([torch.ones_like(key[:, :1, :, :1]).expand(-1, coder.spec.n_sets, -1, -1), *codes], -1)
        vectors = vectors[:, :, coder.spec.first :]
        self.codes = self.codes + second(vectors)
        rows, errors = (x.transpose(0, 1).flatten(1, 2) for x in (vectors, missed))
        self.missed = self.missed + (rows.mT @ errors).double().cpu()


@torch.no_grad()
def fit_decoders(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Fit the maps of all coders of a model, in place."""
    coders = [part for part in model.modules() if isinstance(part, Coder)]
    with observing_codes(coders) as moments:
        tokens = 0
        for batch in batches:
            run_model(model, batch, words=False)
            tokens += next(iter(batch.values())).numel()
            if tokens >= FITTED:
                break
    for coder, own in zip(coders, moments, strict=True):
        if isinstance(own.codes, Tensor) and isinstance(own.missed, Tensor):
            fit_coder(coder, own.codes, own.missed)


@contextmanager
def observing_codes(coders: Sequence[Coder]) -> Iterator[list[CodeMoments]]:
    """Add what every coder codes and decodes, while the model runs without a cache."""
    moments = [CodeMoments() for _ in coders]

    def observed(
        coder: Coder, own: CodeMoments, key: Tensor, value: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        own.add(coder, key, value, positions)
        return Coder.simulate(coder, key, value, positions)

    for coder, own in zip(coders, moments, strict=True):
        coder.__dict__["simulate"] = partial(observed, coder, own)
    try:
        yield moments
    finally:
        for coder in coders:
            del coder.__dict__["simulate"]


def fit_coder(coder: Coder, codes: Tensor, missed: Tensor) -> None:
    """Add to the maps of one coder what its codes say about what decoding missed."""
    n, keys = 1 + coder.key_decode.shape[1], coder.spec.set_keys
    for i in range(coder.spec.n_sets):
        mean, decode = coder.key_mean.view(coder.spec.n_sets, -1)[i], coder.key_decode[i]
        for read, at in alike(decode):
            used = torch.cat([torch.zeros(1, dtype=torch.long), 1 + read])
            change = least_squares(codes[i][used[:, None], used], missed[i][used[:, None], at]).to(decode)
            mean[at] += change[0]
            decode[read[:, None], at] += change[1:]
        change = least_squares(codes[i], missed[i][:, keys:]).to(decode)
        coder.value_mean.view(coder.spec.n_sets, -1)[i] += change[0]
        coder.predict[i] += change[1:n]
        coder.value_decode[i] += change[n:]


def alike(decode: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The codes of which numbers are decoded, and those numbers: a transform of blocks stays one of blocks."""
    patterns, of = (decode != 0).T.cpu().unique(dim=0, return_inverse=True)
    for k, pattern in enumerate(patterns):
        yield pattern.nonzero()[:, 0], (of == k).nonzero()[:, 0]


def least_squares(codes: Tensor, missed: Tensor) -> Tensor:
    """(n, m) from sums of products, (n, n) and (n, m); a code that is always 0 adds nothing."""
    power = codes.diagonal()
    return torch.linalg.solve(codes + torch.diag(torch.where(power > 0, RIDGE * power, 1.0)), missed)
