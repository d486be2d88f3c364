"""`parity` compares the log-probabilities of training and inference, and finds where they diverge."""

from collections.abc import Callable
from typing import Any

from jmp_train.policies.autocasting import none_key_explained
from jmp_train.policies.pytrees import check_flag, check_values
from jmp_train.tools.checking_parity.compared_operations import operations_of
from jmp_train.tools.checking_parity.log_probs import differences_of, tokens_of
from jmp_train.tools.checking_parity.parity_report import ParityReport
from jmp_train.tools.diagnosing import nonfinite_allowed


@nonfinite_allowed()
def parity(
    train_fn: Callable[..., Any],
    infer_fn: Callable[..., Any],
    *args: object,
    where: Any = None,
    operations: bool = True,
) -> ParityReport:
    """Returns a report that compares the log-probabilities of the same tokens in training and inference.

    Reinforcement learning of a language model assumes that the sampler and the trainer compute the same probabilities.
    If the two round differently, the gradient belongs to another policy. The error is much larger in bfloat16 than in
    float16 (arXiv:2510.26788).

    Both functions run once, jitted or not, to measure the distribution of the differences. Then both are traced and run
    operation by operation, together with a float32 copy of each operation, as in `diagnose`. `parity` finds the first
    operation of each function whose values the other function does not compute. It matches values regardless of shape
    and order, so one function may be generation with a cache.

    Args:
      train_fn: a pure function that returns log-probabilities of tokens, of any float dtype: an array or a pytree of
        arrays.
      infer_fn: another one, which returns the same structure and shapes.
      *args: the arguments of both, pytrees of arrays with values, such as parameters and tokens.
      where: True for tokens to compare: booleans that broadcast to each array, or a pytree of such. None for all
        tokens.
      operations: whether to search for the operations where the functions diverge. The search takes many times as long
        as the functions.

    Returns:
      A report. Print it, or read its `mean`, `bands`, `worst` and `first_difference`.

    Raises:
      TypeError: a result is not an array of floats, `where` is not boolean, an argument has no values, or `parity` is
        called within a jax transformation.
      ValueError: the functions return different structures or shapes, or numbers above 0, or `where` selects no token.

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
    check_flag("operations", operations)
    check_values(args, "parity")
    with none_key_explained(train_fn, args):
        trained = train_fn(*args)
    with none_key_explained(infer_fn, args):
        tokens = tokens_of(trained, infer_fn(*args), where)
    found = operations_of(train_fn, infer_fn, args, where) if operations else None
    return ParityReport(**vars(differences_of(tokens)), operations=found)
