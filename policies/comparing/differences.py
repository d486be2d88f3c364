"""The distribution of the differences between two lists of log-probabilities."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jmp_train.policies.comparing.log_probs import Tokens

# Bands of p_train / p_infer; maxtext requires the first.
BANDS = ((0.999, 1.002), (0.99, 1.01), (0.95, 1.05))
QUANTILES = (0.5, 0.9, 0.99, 0.999)
_LEAST, _MOST = -8, 1  # the range of the histogram, as powers of ten
EDGES = tuple(10.0 ** (i / 2) for i in range(2 * _LEAST, 2 * _MOST + 1))
_WORST = 10


@dataclasses.dataclass(frozen=True)
class TokenDifference:
    """A token with a large difference of its log-probabilities.

    Attributes:
      path: the path of its leaf; empty if the functions return an array.
      index: its index in the leaf.
      train: its log-probability in training.
      infer: its log-probability in inference.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> report = jt.parity(lambda x: x, lambda x: x.at[1].add(-2.0), -jnp.ones(3), operations=False)
      >>> report.worst
      (TokenDifference(path='', index=(1,), train=-1.0, infer=-3.0),)
    """

    path: str
    index: tuple[int, ...]
    train: float
    infer: float


@dataclasses.dataclass(frozen=True)
class Differences:
    """The distribution of |log p_train - log p_infer|.

    Tokens that are NaN, or -inf in only one function, are counted and lie outside of all bands. The other statistics
    leave them out. Tokens that are -inf in both functions do not differ.

    Attributes:
      n_tokens: the number of compared tokens.
      n_nan: the number of tokens for which at least one function returns NaN.
      n_infinite: the number of tokens for which only one function returns -inf.
      mean: the mean of the differences.
      median: the median of the differences.
      maximum: the maximum of the differences.
      quantiles: fraction of the tokens -> the difference that this fraction does not exceed.
      bands: bounds of the ratio of probabilities, p_train / p_infer -> the fraction of the tokens within them.
      kl: the estimate k3 of the KL divergence of training from inference, for tokens sampled in inference: the mean of
        r - 1 - log(r), where r is the ratio (J. Schulman, "Approximating KL Divergence", 2020).
      histogram: the number of differences below the first of the `EDGES`, then from each one to the next, and finally
        from the last one on.
      worst: the tokens with the largest differences, largest first; NaN and infinities precede all others.
    """

    n_tokens: int
    n_nan: int
    n_infinite: int
    mean: float
    median: float
    maximum: float
    quantiles: dict[float, float]
    bands: dict[tuple[float, float], float]
    kl: float
    histogram: tuple[int, ...]
    worst: tuple[TokenDifference, ...]


def differences_of(tokens: Tokens) -> Differences:
    """Returns the distribution of differences."""
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(tokens.train == tokens.infer, 0.0, tokens.train - tokens.infer)  # two infinities are equal
    size = np.abs(log_ratio)
    finite = np.isfinite(size)
    kept, ratio = size[finite], log_ratio[finite]
    quantiles = np.quantile(kept, QUANTILES) if kept.size else np.full(len(QUANTILES), math.nan)
    order = np.argsort(-np.where(finite, size, np.inf), kind="stable")[:_WORST]
    return Differences(
        n_tokens=len(size),
        n_nan=int(np.isnan(size).sum()),
        n_infinite=int(np.isinf(size).sum()),
        mean=_of(np.mean, kept),
        median=_of(np.median, kept),
        maximum=_of(np.max, kept),
        quantiles={share: float(x) for share, x in zip(QUANTILES, quantiles, strict=True)},
        bands={band: _share_within(ratio, band, len(size)) for band in BANDS},
        kl=_of(np.mean, np.expm1(ratio) - ratio),
        histogram=tuple(int(n) for n in np.histogram(kept, (-1, *EDGES, np.inf))[0]),
        worst=tuple(_token(tokens, int(i)) for i in order if size[i] != 0),
    )


def _of(function: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    return float(function(values)) if values.size else math.nan


def _share_within(log_ratio: np.ndarray, band: tuple[float, float], count: int) -> float:
    low, high = np.log(band)
    return float(((log_ratio >= low) & (log_ratio <= high)).sum() / count)


def _token(tokens: Tokens, number: int) -> TokenDifference:
    return TokenDifference(*tokens.place(number), float(tokens.train[number]), float(tokens.infer[number]))
