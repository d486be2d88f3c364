"""States as users have them, which releases have saved: `released_states.py FOLDER` saves them as this version does.

The folder `tests/data/checkpoint_0_1` was made so by version 0.1.0: `checkpoints.tar.gz` by the library and by
`jmp-train train karate`, and `values.json`, without the checkpoints' code, of the same states.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

import jmp_train as jt

LOSS_SCALE = jt.torch_loss_scale(2.0**10, growth_interval=2)
STEP_OF = {"master_weights": 3, "stochastic_rounding": 3, "flat": 7}  # of each state's checkpoint
KARATE = ["train", "karate", "--policy", "mixed_float16"]


def loss_fn(params: Any, model_state: Any, batch: jax.Array, rng: jax.Array) -> Any:
    """Returns a loss of all parameters, and the next mean of the inputs."""
    noise = 0.125 * jax.random.normal(rng, batch.shape, jnp.float32)
    x = (batch + noise).astype(params["dense"]["kernel"].dtype)
    y = x @ params["dense"]["kernel"] + params["dense"]["bias"]
    y = jnp.tanh(y.astype(jnp.float32) * params["norm"])
    mean = 0.9 * model_state["mean"] + 0.1 * batch.mean(axis=0)
    return (y**2).mean(), ({"mean": mean, "batches": model_state["batches"] + 1}, None)


def new_params(dtype: Any) -> dict[str, Any]:
    """Returns a dense layer in a half dtype and a scale in float32."""
    kernel = jnp.linspace(-1, 1, 6, dtype=jnp.float32).reshape(3, 2).astype(dtype)
    dense = {"kernel": kernel, "bias": jnp.array([0.25, -0.5], dtype)}
    return {"dense": dense, "norm": jnp.array([1.0, 0.5], jnp.float32)}


def optimizers() -> dict[str, tuple[Any, Any]]:
    """Returns the parameters' dtype and the optimizer of each state but the flat one."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.25))
    sgd = jt.with_loss_scale(optax.sgd(0.25), LOSS_SCALE)
    return {
        "master_weights": (
            jnp.float16,
            jt.with_master_weights(jt.with_loss_scale(adam, LOSS_SCALE)),
        ),
        "stochastic_rounding": (
            jnp.bfloat16,
            jt.with_stochastic_rounding(sgd, jax.random.key(5)),
        ),
    }


def new_state(name: str) -> Any:
    """Returns a state before its first step, of the structure, the shapes and the dtypes of what was saved."""
    if name == "flat":
        return flat_state(filled=False)
    dtype, optimizer = optimizers()[name]
    model_state = {"mean": jnp.zeros(3, jnp.float32), "batches": jnp.zeros((), jnp.int32)}
    return jt.TrainState.create(new_params(dtype), optimizer, model_state=model_state, rng=jax.random.key(7))


def flat_state(*, filled: bool) -> dict[str, Any]:
    """Returns a tree of the kinds of leaves that users have beside a `TrainState`."""
    loss_scale = jt.DynamicLossScale(jnp.float32(2.0**12), counter=jnp.int32(3), hysteresis=2)
    state = {
        "scales": jt.policies.PerLossScale((loss_scale, jt.StaticLossScale(jnp.float32(64)))),
        "halves": [jnp.array([1.5, jnp.nan, -jnp.inf], jnp.float16), jnp.bfloat16(-2.75)],
        "fp8": jnp.array([0.5, 448.0], jnp.float8_e4m3fn),
        "keys": jax.random.split(jax.random.key(3), 2),
        "rbg": jax.random.key(4, impl="rbg"),
        "old_key": jax.random.PRNGKey(9),
        "numpy": np.arange(4, dtype=np.int64) * 2**40,
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3), jnp.int8),
        "numbers": (True, 41, 0.1),
        "nothing": None,
    }
    return state if filled else jax.tree.map(_blank, state)


def _blank(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        implementation = jax.random.key_impl(x)
        return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(x)), impl=implementation)
    if isinstance(x, jax.Array):
        return jnp.zeros_like(x)
    return np.zeros_like(x) if isinstance(x, np.ndarray) else type(x)(0)


def after_steps(name: str, state: jt.TrainState, *inputs: float) -> jt.TrainState:
    """Returns a state after a train step for each number, which its batch is multiplied with."""
    step = jax.jit(jt.train_step(loss_fn, optimizers()[name][1]))
    batch = jnp.array([[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]], jnp.float32)
    for x in inputs:
        state, _ = step(state, batch * x)
    return state


def saved_state(name: str) -> Any:
    """Returns what was saved: after steps of which the second overflowed."""
    if name == "flat":
        return flat_state(filled=True)
    return after_steps(name, new_state(name), 1.0, np.inf, 0.5)


def values_of(state: Any) -> dict[str, dict[str, Any]]:
    """Returns the dtype, the shape and the bytes of each leaf by its path; of a random key its data's."""
    return {jax.tree_util.keystr(p): _value(x) for p, x in jax.tree.leaves_with_path(state)}


def _value(x: Any) -> dict[str, Any]:
    kind = str(getattr(x, "dtype", type(x).__name__))
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    return {"dtype": kind, "shape": list(array.shape), "bytes": array.tobytes().hex()}


def next_params(name: str, state: jt.TrainState) -> dict[str, list[Any]]:
    """Returns the parameters after one more step, by their paths."""
    params = after_steps(name, state, 1.5).params
    return {
        jax.tree_util.keystr(path): np.asarray(x, np.float32).tolist() for path, x in jax.tree.leaves_with_path(params)
    }


def main(folder: Path) -> None:
    """Writes the checkpoints, and what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {name: saved_state(name) for name in STEP_OF}
    values: dict[str, Any] = {name: values_of(state) for name, state in states.items()}
    values["next"] = {name: next_params(name, states[name]) for name in optimizers()}
    (folder / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        for name, state in states.items():
            with jt.CheckpointStore(Path(temporary, name)) as store:
                store.save(STEP_OF[name], state, metadata={"state": name})
        jt.save_weights(Path(temporary, "weights.safetensors"), states["master_weights"].params)
        message = serialization.to_bytes(states["master_weights"])
        Path(temporary, "state.msgpack").write_bytes(message)
        command = [sys.executable, "-m", "jmp_train", *KARATE, "--epochs", "4"]
        command += ["--checkpoint-dir", str(Path(temporary, "karate")), "--checkpoint-every", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(Path(temporary, "karate", "step_00000004"))
        with tarfile.open(folder / "checkpoints.tar.gz", "w:gz") as archive:
            for path in sorted(Path(temporary).iterdir()):
                archive.add(path, path.name, filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main(Path(sys.argv[1]))
