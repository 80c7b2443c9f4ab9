"""The lag profile of a text: what the token m back adds to the prediction of the next one, beside all other lags.

*The estimator.* Let e_t be the one-hot vector of token t, less its mean. The best additive prediction from n tokens,

    e_t ≈ Σ_{m≤n} A_m e_{t−m}    (least squares),

has the form that the bound is about, and ‖ρ_m‖ = (E‖A_m e_{t−m}‖²)^½ is the root mean square of what lag m contributes,
in units of probability. All lags are fitted together, so what a nearer token already says is not counted again: in a
Markov chain the mutual information with the token three back is not zero, and ‖ρ_3‖ is.

*Noise.* A norm of estimated coefficients is never zero, however little there is. So the text is cut into blocks, the
odd and the even ones give two fits A and A' with independent errors, and ‖ρ_m‖² = E⟨A_m e, A'_m e⟩ is unbiased; what
comes out below zero is zero.

*Cost.* Rare tokens share one class, so that there are at most UNKNOWNS coefficients per output, and at least EVIDENCE
tokens for each: counts of pairs are all that is read from the text, and one Cholesky factor of a block Toeplitz matrix
does the fit.

*Dimension.* The tokens count as 1/Σp² of them, the number of equally frequent ones that meet as often.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deadweight.allocate.bound import Floats
from deadweight.allocate.profile import Profile
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.text import printable

Tokens = NDArray[np.int64]
UNKNOWNS = 2048  # classes × lags at most: a second of work
EVIDENCE = 20  # tokens per unknown at least
CLASSES = 64  # at most
BLOCKS = 64  # the text is cut into so many, odd and even
LONGEST = 4_000_000  # tokens read


def measure_text(text: str, lags: int, *, tokenizer: str = "bytes", say: Progress = silent) -> Profile:
    """The profile of a text file (or a folder, datasets:NAME, embedded), as that tokenizer cuts it."""
    tokens = read_tokens(text, tokenizer, say)
    say("fitting all lags together")
    values = lag_norms(tokens, lags, name=text)
    return Profile(values, f"measured on {printable(text)}, {len(tokens):,} tokens", effective_tokens(tokens))


def read_tokens(text: str, tokenizer: str, say: Progress) -> Tokens:
    from deadweight.source.plain_text import boundary, check_text, read_text
    from deadweight.train.data import tokenizer_for

    read = read_text(text, say)
    check_text(read, text)
    read = read[: boundary(read, 4 * LONGEST)]
    with tempfile.TemporaryDirectory() as folder:
        encode, _ = tokenizer_for(tokenizer, read, Path(folder), say)
        parts = [np.asarray(ids, dtype=np.int64) for _, ids in encode(read)]
    return np.concatenate(parts)[:LONGEST]


def effective_tokens(tokens: Tokens) -> int:
    """1/Σp²: how many equally frequent tokens would meet as often as these."""
    shares = np.bincount(tokens) / len(tokens)
    return max(1, round(1 / float((shares**2).sum())))


def lag_norms(tokens: Tokens, lags: int, name: str = "the text") -> tuple[float, ...]:
    """‖ρ_m‖ for m = 1 … lags; zeros where nothing is to be seen above the noise."""
    kinds = len(np.unique(tokens))
    if kinds < 2:
        raise DeadweightError(f"{printable(name)} has {kinds} kind of token; expected text with two or more")
    classes = min(kinds, CLASSES, UNKNOWNS // lags, len(tokens) // 2 // EVIDENCE // lags)
    if classes < 2:
        need = 2 * 2 * EVIDENCE * lags
        raise DeadweightError(
            f"{printable(name)} has {len(tokens):,} tokens; expected {need:,} or more for {lags} lags: give more text, "
            f"or ask for {max(1, len(tokens) // (4 * EVIDENCE))} lags"
        )
    labels = classed(tokens, classes)
    counts = [pair_counts(half, lags, classes) for half in halves(labels, lags)]
    first, second = (fitted(pairs) for pairs in counts)
    spread = covariance(counts[0][0] + counts[1][0])[:-1, :-1]
    products = np.einsum("mai,ij,maj->m", first, spread, second)
    return tuple(np.sqrt(np.maximum(products, 0.0)).tolist())


def classed(tokens: Tokens, classes: int) -> Tokens:
    """The most frequent tokens by rank, all others as the last class."""
    frequent = np.argsort(-np.bincount(tokens), kind="stable")[: classes - 1]
    table = np.full(int(tokens.max()) + 1, classes - 1)
    table[frequent] = np.arange(len(frequent))
    return table[tokens]


def halves(labels: Tokens, lags: int) -> tuple[list[Tokens], list[Tokens]]:
    """Odd and even blocks: both halves have a bit of everything that the text is about."""
    n = max(2, min(BLOCKS, len(labels) // (4 * lags)))
    blocks = np.array_split(labels, n)
    return blocks[::2], blocks[1::2]


def pair_counts(blocks: list[Tokens], lags: int, classes: int) -> Floats:
    """[m, a, b]: how often class a comes m places after class b."""
    counts = np.zeros((lags + 1, classes * classes))
    for block in blocks:
        for m in range(lags + 1):
            pairs = block[m:] * classes + block[: len(block) - m]
            counts[m] += np.bincount(pairs, minlength=classes * classes)
    return counts.reshape(lags + 1, classes, classes)


def covariance(pairs: Floats) -> Floats:
    """Of two one-hot vectors, from how often each pair came."""
    shares = pairs / pairs.sum()
    return np.asarray(shares - np.outer(shares.sum(1), shares.sum(0)))


def fitted(pairs: Floats) -> Floats:
    """[m, a, b]: A_m, by the normal equations. The last class is what the others leave, so it has no coefficient."""
    lags, classes = len(pairs) - 1, pairs.shape[1]
    blocks = [covariance(p) for p in pairs]
    small = [b[:-1, :-1] for b in blocks]
    n = classes - 1
    whole = np.empty((lags, n, lags, n))
    for i in range(lags):
        for j in range(lags):
            whole[i, :, j] = small[j - i] if j >= i else small[i - j].T
    whole = whole.reshape(lags * n, lags * n)
    whole[np.diag_indices(lags * n)] += np.tile(np.diag(small[0]), lags) * 1e-3  # a class that hardly comes
    right = np.stack([b[:, :-1] for b in blocks[1:]], 1).reshape(classes, lags * n)
    coefficients: Any = np.linalg.solve(whole, right.T).T
    return np.asarray(coefficients.reshape(classes, lags, n).swapaxes(0, 1))
