"""The lag profile of a text: how much the token m back adds to the prediction of the next token, given all other lags.

*The estimator.* Let e_t be the one-hot vector of token t, less its mean. The best additive prediction from n tokens,

    e_t ≈ Σ_{m≤n} A_m e_{t−m}    (least squares),

has the form that the bound assumes, and ‖ρ_m‖ = (E‖A_m e_{t−m}‖²)^½ is the root mean square of what lag m contributes,
in units of probability. All lags are fitted together, so information that a nearer token carries is not counted twice:
in a Markov chain the mutual information with the token three back is not zero, but ‖ρ_3‖ is.

*Noise.* The norm of estimated coefficients is never zero, even where the true ones are. So the text is cut into blocks,
the odd and the even ones give two fits A and A' with independent errors, and ‖ρ_m‖² = E⟨A_m e, A'_m e⟩ is unbiased.
Negative estimates become zero.

*Cost.* Rare tokens share one class, so that there are at most UNKNOWNS coefficients per output, and at least EVIDENCE
tokens for each. The fit needs only counts of pairs, and solves one block Toeplitz system.

*Dimension.* The effective number of tokens is 1/Σp²: as many equally frequent tokens would coincide as often.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deadweight.allocate.bound import Floats
from deadweight.allocate.profile import Profile
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.printable import printable

Tokens = NDArray[np.int64]
UNKNOWNS = 2048  # classes × lags at most: a second of work
EVIDENCE = 20  # tokens per unknown at least
CLASSES = 64  # at most
BLOCKS = 64  # the text is cut into so many, odd and even
LONGEST = 4_000_000  # tokens read


def measure_text(text: str, lags: int, *, tokenizer: str = "bytes", progress: Progress = silent) -> Profile:
    """The profile of a text file (or a folder, datasets:NAME, embedded), tokenized by `tokenizer`."""
    tokens = read_tokens(text, tokenizer, progress)
    progress("fitting all lags together")
    values = lag_norms(tokens, lags, name=text)
    return Profile(values, f"measured on {printable(text)}, {len(tokens):,} tokens", effective_tokens(tokens))


def read_tokens(text: str, tokenizer: str, progress: Progress) -> Tokens:
    from deadweight.source.plain_text import boundary, check_text, read_text
    from deadweight.train.data import tokenizer_for

    read = read_text(text, progress)
    check_text(read, text)
    read = read[: boundary(read, 4 * LONGEST)]
    with tempfile.TemporaryDirectory() as folder:
        encode, _ = tokenizer_for(tokenizer, read, Path(folder), progress)
        parts = [np.asarray(ids, dtype=np.int64) for _, ids in encode(read)]
    return np.concatenate(parts)[:LONGEST]


def effective_tokens(tokens: Tokens) -> int:
    """1/Σp²: how many equally frequent tokens would coincide as often as these."""
    shares = np.bincount(tokens) / len(tokens)
    return max(1, round(1 / float((shares**2).sum())))


def lag_norms(tokens: Tokens, lags: int, name: str = "the text") -> tuple[float, ...]:
    """‖ρ_m‖ for m = 1 … lags; zero where the estimate is not above the noise."""
    kinds = len(np.unique(tokens))
    if kinds < 2:
        raise DeadweightError(f"{printable(name)} repeats a single token; expected two or more different ones")
    classes = min(kinds, CLASSES, UNKNOWNS // lags, len(tokens) // 2 // EVIDENCE // lags)
    if classes < 2:
        need = 2 * 2 * EVIDENCE * lags
        raise DeadweightError(
            f"{printable(name)} has {len(tokens):,} tokens; expected {need:,} or more for {lags} lags: give more text, "
            f"or ask for {max(1, len(tokens) // (4 * EVIDENCE))} lags"
        )
    labels = label_classes(tokens, classes)
    counts = [pair_counts(half, lags, classes) for half in halves(labels, lags)]
    first, second = (fit(pairs) for pairs in counts)
    spread = covariance(counts[0][0] + counts[1][0])[:-1, :-1]
    products = np.einsum("mai,ij,maj->m", first, spread, second)
    return tuple(np.sqrt(np.maximum(products, 0.0)).tolist())


def label_classes(tokens: Tokens, classes: int) -> Tokens:
    """The most frequent tokens by rank, all others as the last class."""
    frequent = np.argsort(-np.bincount(tokens), kind="stable")[: classes - 1]
    table = np.full(int(tokens.max()) + 1, classes - 1)
    table[frequent] = np.arange(len(frequent))
    return table[tokens]


def halves(labels: Tokens, lags: int) -> tuple[list[Tokens], list[Tokens]]:
    """Odd and even blocks, so that both halves cover the whole text."""
    n = max(2, min(BLOCKS, len(labels) // (4 * lags)))
    blocks = np.array_split(labels, n)
    return blocks[::2], blocks[1::2]


def pair_counts(blocks: list[Tokens], lags: int, classes: int) -> Floats:
    """[m, a, b]: how often class a follows class b at a distance of m tokens."""
    counts = np.zeros((lags + 1, classes * classes))
    for block in blocks:
        for m in range(lags + 1):
            pairs = block[m:] * classes + block[: len(block) - m]
            counts[m] += np.bincount(pairs, minlength=classes * classes)
    return counts.reshape(lags + 1, classes, classes)


def covariance(pairs: Floats) -> Floats:
    """The covariance of two one-hot vectors, from the counts of their pairs."""
    shares = pairs / pairs.sum()
    return np.asarray(shares - np.outer(shares.sum(1), shares.sum(0)))


def fit(pairs: Floats) -> Floats:
    """[m, a, b]: A_m, by the normal equations. The last class follows from the others, so it has no coefficient."""
    lags, classes = len(pairs) - 1, pairs.shape[1]
    blocks = [covariance(p) for p in pairs]
    small = [b[:-1, :-1] for b in blocks]
    n = classes - 1
    whole = np.empty((lags, n, lags, n))
    for i in range(lags):
        for j in range(lags):
            whole[i, :, j] = small[j - i] if j >= i else small[i - j].T
    whole = whole.reshape(lags * n, lags * n)
    whole[np.diag_indices(lags * n)] += np.tile(np.diag(small[0]), lags) * 1e-3  # for classes that hardly occur
    right = np.stack([b[:, :-1] for b in blocks[1:]], 1).reshape(classes, lags * n)
    coefficients = np.linalg.solve(whole, right.T).T.reshape(classes, lags, n)
    return np.asarray(coefficients.swapaxes(0, 1))
