"""Trains in float16, then in float32, by a precision schedule; checkpoints resume before and after the switch.

    python examples/precision_schedule.py [DIR [STEPS]]

The script saves in DIR, "checkpoints" by default, resumes from the last checkpoint there, and stops early after STEPS
steps. The final parameters are bitwise the same, however often it is stopped.

Expected: about 97% of the test images right after 400 steps.
"""

import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_train as jt

TOTAL, BATCH_SIZE, SAVE_EVERY = 400, 64, 50
SCHEDULE = jt.PolicySchedule({0.0: "autocast_float16", 0.9: "float32"})


class MLP(nnx.Module):
    """Two layers; it has no code for precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [batch, 10] of pixels [batch, 64]."""
        return self.out(nnx.relu(self.hidden(x)))


graph, params = nnx.split(MLP(nnx.Rngs(0)), nnx.Param)


def predict(params: Any, x: Any) -> jax.Array:
    """Returns the logits."""
    return nnx.merge(graph, params)(x)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Returns the mean cross-entropy."""
    logits = predict(params, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def main(directory: str = "checkpoints", stop_after: str = str(TOTAL)) -> None:
    """Trains up to a step, and at the end prints the test accuracy and a digest of the parameters."""
    stop = int(stop_after)
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split((images / 16).astype(np.float32), labels, test_size=0.2, random_state=0)

    # One optimizer and one state, whatever the policy is.
    tx = jt.with_loss_scale(optax.adam(optax.cosine_decay_schedule(3e-3, TOTAL)), jt.torch_loss_scale())
    state = jt.TrainState.create(params, tx)

    def make_step(policy: Any) -> Any:
        print(f"compiling {policy}")
        return jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)

    with jt.CheckpointStore(directory) as store:
        start = 0
        if store.steps():
            start, state = store.restore(state)
        for number, step in enumerate(SCHEDULE.steps(make_step, TOTAL, start), start + 1):
            if number > stop:
                return
            rows = np.random.default_rng(number).choice(len(x), BATCH_SIZE)
            state, metrics = step(state, {"x": x[rows], "y": y[rows]})
            if number % SAVE_EVERY == 0 or number == stop:
                store.save(number, state)
                print(f"step {number}  loss {metrics['loss']:.4f}  loss scale {metrics['loss_scale']:g}")

    policy = SCHEDULE.policy_at(TOTAL, TOTAL)  # the last one
    logits = jax.jit(jt.apply_policy(predict, policy))(state.params, test_x)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)))
    print(f"test accuracy {np.mean(np.argmax(logits, -1) == test_y):.2%}  parameters {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
