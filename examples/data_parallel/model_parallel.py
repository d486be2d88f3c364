"""PyTorch's "Combining DDP with model parallelism" in JAX and in float16: one model on two devices, several times.

    jmp-train launch -n 2 -- examples/data_parallel/model_parallel.py           # one model, its layers apart
    jmp-train launch -n 4 -- examples/data_parallel/model_parallel.py tensor    # two, each layer sharded in two
    JAX_NUM_CPU_DEVICES=8 NPROC=32 python examples/data_parallel/model_parallel.py   # four, in one process

Layers are on different devices ("layers"), or each is sharded over both ("tensor"). Step and optimizer are those of one
device; all devices skip a step that overflows on one. Expected: a loss below 0.1 after 10 epochs, in both.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train.data import array_batches

BATCH_SIZE = 64  # of all devices together


def dense(params: Any, x: jax.Array) -> jax.Array:
    """A dense layer, whose product is added in float32 if its input is sharded over devices."""
    kernel, bias = params["kernel"], params["bias"]
    return jt.policies.float32_dot_general(x, kernel, (((1,), (0,)), ((), ()))) + bias


def first(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    """The tutorial's net1, on the first device."""
    del rng
    return jax.nn.relu(dense(params, x))


def second(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    """The tutorial's net2, on the second device."""
    del rng
    return dense(params, x)


def make_params(key: jax.Array) -> list[Any]:
    """Returns the parameters of both layers."""
    keys, shapes = jax.random.split(key), ((10, 64), (64, 5))
    return [
        {"kernel": jax.random.normal(k, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for k, shape in zip(keys, shapes, strict=True)
    ]


def layers_apart(params: list[Any], mesh: Mesh) -> Any:
    """Returns the model with a layer on each device, its parameters, and where they are."""
    stages = jt.parallel.Stages([first, second], params)
    return stages.pipeline(mesh, "model"), stages.pack(params), P("model")


def layers_sharded(params: list[Any], mesh: Mesh) -> Any:
    """Returns the model with both layers sharded: the first by columns, the second by rows."""
    del mesh
    rules = {
        "0/kernel": P(None, "model"),
        "0/bias": P("model"),
        "1/kernel": P("model"),  # its products are added up over the devices
    }

    def model(params: list[Any], x: jax.Array) -> jax.Array:
        return second(params[1], first(params[0], x, None), None)

    return model, params, jt.parallel.specs_by_path(params, rules)


def make_data(seed: int) -> dict[str, np.ndarray]:
    """Returns points and a smooth function of them to learn."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(2048, 10)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ random.normal(size=(10, 5)) / 3).astype(np.float32)}


def main(form: str = "layers", seed: int = 0, epochs: int = 10) -> None:
    """Trains, and prints one line per epoch."""
    jt.distributed.initialize()
    if jax.device_count() % 2:
        sys.exit(f"a model takes two devices, there are {jax.device_count()}; see the examples")
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
    forms = {"layers": layers_apart, "tensor": layers_sharded}
    model, params, specs = forms[form](make_params(jax.random.key(seed)), mesh)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        outputs = model(params, batch["x"]).astype(jnp.float32)
        return optax.squared_error(outputs, batch["y"].astype(jnp.float32)).mean()

    tx = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale(2.0**10))
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    state = jt.TrainState.create(params, tx)
    shardings = jt.parallel.state_shardings(state, mesh, params=specs)
    run = jt.sharded_step(step, mesh, shardings=shardings, donate_argnums=0)
    state = jt.distributed.broadcast_state(state, shardings=shardings)

    data = make_data(seed)
    batches = array_batches(data, BATCH_SIZE, seed=seed, epochs=epochs, sharding=NamedSharding(mesh, P("data")))
    steps_per_epoch = len(data["x"]) // BATCH_SIZE
    losses = []
    for number, batch in enumerate(batches, start=1):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the step, so that a failure shows in it
        if number % steps_per_epoch == 0 and jt.distributed.is_main_process():
            loss = np.mean(losses[-steps_per_epoch:])
            skipped = int(metrics["skipped_steps"])
            print(f"epoch {number // steps_per_epoch}  loss {loss:.4f}  skipped {skipped}")
    if jt.distributed.is_main_process():
        own = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params))
        whole = sum(x.size for x in jax.tree.leaves(state.params))
        print(f"{len(mesh.devices)} models; a device has {own} of {whole} parameters")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "layers")
