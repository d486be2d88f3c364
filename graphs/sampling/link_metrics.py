"""Metrics of scores for link prediction: AUC, mean reciprocal rank, hits; on the host, in float64.

Reference: Hu et al., Open Graph Benchmark, https://arxiv.org/abs/2005.00687 (its evaluator of links).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Numbers = ArrayLike | Sequence[float] | Sequence[Sequence[float]]


def roc_auc(labels: Numbers, scores: Numbers) -> float:
    """Returns how often a link scores higher than a pair that is no link; equal scores count half.

    Args:
      labels: bool or 0 and 1 [pairs], true for links.
      scores: floating [pairs].

    Raises:
      ValueError: shapes differ, labels are neither 0 nor 1 or all the same, or a score is NaN.

    Example:
      >>> roc_auc([1, 1, 0, 0], [0.9, 0.4, 0.4, 0.1])
      0.875

    Reference: Fawcett, An introduction to ROC analysis, 2006.
    """
    from scipy.stats import rankdata

    values, is_link = _scores("scores", scores, 1), np.asarray(labels)
    if is_link.shape != values.shape:
        raise ValueError(f"labels and scores must have one shape, got {is_link.shape} and {values.shape}")
    if not np.isin(is_link, (0, 1)).all():
        raise ValueError("labels must be 0 or 1")
    is_link = is_link.astype(bool)
    links, others = int(is_link.sum()), int((~is_link).sum())
    if not links or not others:
        raise ValueError(f"labels must have both 0 and 1, got {others} zeros and {links} ones")
    ranks = rankdata(values)[is_link].sum()
    return float((ranks - links * (links + 1) / 2) / (links * others))


def mean_reciprocal_rank(positives: Numbers, negatives: Numbers) -> float:
    """Returns the mean of 1 over the rank of each link among its negatives; equal scores get their mean rank.

    Args:
      positives: floating [links], their scores.
      negatives: floating [links, k], the scores of each link's negatives.

    Raises:
      ValueError: shapes do not fit, there are no links, or a score is NaN.

    Example:
      >>> mean_reciprocal_rank([3.0, 1.0], [[1.0, 2.0], [5.0, 0.0]])
      0.75
    """
    links, others = _pair(positives, negatives)
    if others.ndim != 2 or len(others) != len(links):
        raise ValueError(f"negatives must be [{len(links)}, k], got shape {others.shape}")
    higher, equal = (others > links[:, None]).sum(axis=1), (others == links[:, None]).sum(axis=1)
    return float((1 / (1 + higher + equal / 2)).mean())


def hits_at(k: int, positives: Numbers, negatives: Numbers) -> float:
    """Returns the fraction of links that score higher than the `k`-th highest of all negatives.

    Args:
      k: rank of the negative with which links are compared.
      positives: floating [links], their scores.
      negatives: floating [...], the scores of all negatives; with fewer than `k` the fraction is 1.

    Raises:
      ValueError: there are no links, `k` is not positive, or a score is NaN.

    Example:
      >>> hits_at(2, [3.0, 1.0], [5.0, 2.0, 0.0])
      0.5
    """
    links, others = _pair(positives, negatives)
    if k < 1:
        raise ValueError(f"k={k} must be positive")
    if others.size < k:
        return 1.0
    return float((links > np.sort(others, axis=None)[-k]).mean())


def _pair(positives: Numbers, negatives: Numbers) -> tuple[np.ndarray, np.ndarray]:
    links, others = _scores("positives", positives, 1), _scores("negatives", negatives)
    if not len(links):
        raise ValueError("positives is empty")
    return links, others


def _scores(name: str, scores: Numbers, rank: int | None = None) -> np.ndarray:
    """Returns float64 scores, after checking that none is NaN."""
    array = scores if isinstance(scores, jax.Array) else np.asarray(scores)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating, got {array.dtype}")
    values = np.asarray(array).astype(np.float64)
    if rank is not None and values.ndim != rank:
        raise ValueError(f"{name} must have one axis, got shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"{name} has NaN")
    return values
