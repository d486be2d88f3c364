"""How far two lists of log-probabilities are apart, as a distribution."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jmp_train.policies.comparing.log_probs import Tokens

# Of p_train / p_infer; the first is what maxtext asks for.
BANDS = ((0.999, 1.002), (0.99, 1.01), (0.95, 1.05))
QUANTILES = (0.5, 0.9, 0.99, 0.999)
_LEAST, _MOST = -8, 1  # powers of ten of the histogram
EDGES = tuple(10.0 ** (i / 2) for i in range(2 * _LEAST, 2 * _MOST + 1))
_WORST = 10


@dataclasses.dataclass(frozen=True)
class TokenDifference:
    """A token whose log-probabilities are far apart.

    Attributes:
      path: of the leaf that it is in; empty if the functions return an array.
      index: of its place there.
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

    Tokens that are NaN, or -inf in one function alone, are counted, are outside of all bands, and are left out of
    everything else. Those that are -inf in both do not differ.

    Attributes:
      n_tokens: how many tokens count.
      n_nan: of how many one function or both say NaN.
      n_infinite: of how many one function says -inf, and the other does not.
      mean: of the differences.
      median: of the differences.
      maximum: of the differences.
      quantiles: share of the tokens -> difference that so many do not exceed.
      bands: bounds of the ratio of probabilities, p_train / p_infer -> share of the tokens that are within.
      kl: the estimate k3 of the divergence of training from inference, if the tokens are drawn in inference: the mean
        of r - 1 - log(r), r being the ratio (J. Schulman, "Approximating KL Divergence", 2020).
      histogram: how many differences are from one of the `EDGES` to the next; before it how many are below the first,
        and at last how many from the last one.
      worst: the tokens that differ most, worst first; NaN and infinities before all.
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
