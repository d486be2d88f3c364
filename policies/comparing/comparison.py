"""`parity`: how far the log-probabilities of training and inference are apart, and from which operation on."""

from collections.abc import Callable
from typing import Any

from jmp_train.policies.autocasting import none_key_explained
from jmp_train.policies.comparing.differences import differences_of
from jmp_train.policies.comparing.log_probs import tokens_of
from jmp_train.policies.comparing.operations import operations_of
from jmp_train.policies.comparing.report import ParityReport
from jmp_train.policies.pytrees import check_values


def parity(
    train_fn: Callable[..., Any],
    infer_fn: Callable[..., Any],
    *args: object,
    where: Any = None,
    operations: bool = True,
) -> ParityReport:
    """Compares the log-probabilities that training and inference give the same tokens.

    Reinforcement learning of a language model takes the sampler's probabilities for the trainer's. Where the two
    round otherwise the gradient is of another policy; in bfloat16 by far more than in float16 (arXiv:2510.26788).

    Both functions run once as they are, jitted or not, for the distribution of the differences. Then both are traced
    and run operation by operation beside float32 shadows of themselves, which `diagnose` does too, and it is looked
    for the first operation of each whose values the other does not compute; whatever their shapes and order are, so
    that one of them may be generation with a cache.

    Args:
      train_fn: a pure function to log-probabilities of tokens, of any float dtype: an array, or a pytree of arrays.
      infer_fn: another one, to the same structure and shapes.
      *args: what both are given, pytrees of arrays with values, such as parameters and tokens.
      where: which tokens count: booleans that broadcast to each array, or a pytree of such; None for all.
      operations: whether to look for the operation; this takes many times as long as the functions do.

    Returns:
      A report: print it, or look at its `mean`, `bands`, `worst` and `first_difference`.

    Raises:
      TypeError: a result is no array of floats, `where` is not boolean, an argument has no values, or it is called
        within a transform of jax.
      ValueError: the functions return different structures or shapes, or numbers above 0, or no token is left.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_train as jt
      >>> def train(logits):
      ...     return jax.nn.log_softmax(logits)
      >>> def infer(logits):
      ...     return jax.nn.log_softmax(logits.astype(jnp.bfloat16)).astype(jnp.float32)
      >>> report = jt.parity(train, infer, jnp.linspace(-3, 3, 60).reshape(4, 15))
      >>> report.n_tokens, round(report.mean, 3), report.first_difference.kind
      (60, 0.005, 'rounding')
      >>> report.first_difference.infer.primitive
      'convert_element_type'

    Reference: Qi and others, "Defeating the Training-Inference Mismatch via FP16", arXiv:2510.26788, 2025.
    """
    check_values(args, "parity")
    with none_key_explained(train_fn, args):
        trained = train_fn(*args)
    with none_key_explained(infer_fn, args):
        tokens = tokens_of(trained, infer_fn(*args), where)
    found = operations_of(train_fn, infer_fn, args, where) if operations else None
    return ParityReport(**vars(differences_of(tokens)), operations=found)
