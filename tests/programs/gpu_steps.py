"""Builders of train steps for `compile_for_gpu`, which runs in an environment without pytest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import ShapeDtypeStruct as Struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jt

INPUTS, WIDTH, CLASSES, ROWS, DEPTH = 64, 512, 10, 8192, 6
KEPT = {"donate_argnums": 0, "keep_unused": True}  # so that arguments have the numbers of the leaves


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.third = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))


def mlp(policy: str) -> tuple[Any, ...]:
    """A step of three dense layers in flax nnx, under a policy or under autocast to float16."""
    graph, params = nnx.split(jax.eval_shape(lambda: MLP(nnx.Rngs(0))))
    return _step(lambda params, x: nnx.merge(graph, params)(x), params, INPUTS, policy)


def mlp_on(is_state_shared: str, mesh: Mesh) -> tuple[Any, ...]:
    """The same with the batch split over the devices; each has all of the state, or a part of what can be split."""
    step, (state, batch), options = mlp("mixed_float16")

    def placed(tree: Any, split: Callable[[Any], bool]) -> Any:
        def place(leaf: Any) -> Any:
            spec = PartitionSpec("data") if split(leaf) else PartitionSpec()
            return Struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree)

    state = placed(state, is_split if is_state_shared == "True" else lambda _: False)
    return step, (state, placed(batch, is_split)), options


def is_split(leaf: Any) -> bool:
    """Whether eight devices can have an eighth each."""
    return bool(leaf.shape) and leaf.shape[0] % 8 == 0


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = linen.Dense(2 * WIDTH, name="up", dtype=x.dtype)(x)
        return x + linen.Dense(WIDTH, name="down", dtype=x.dtype)(linen.gelu(h)), None


class Stack(linen.Module):
    is_recomputed: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(WIDTH, name="embed", dtype=x.dtype)(x)
        block = linen.remat(Block, prevent_cse=False) if self.is_recomputed else Block
        scan = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
        return linen.Dense(CLASSES, name="head", dtype=x.dtype)(scan(name="blocks")(x, None)[0])


def stack(is_recomputed: str) -> tuple[Any, ...]:
    """A step of layers in flax linen that `scan` runs, with or without recomputing them for the gradient."""
    model = Stack(is_recomputed == "True")
    x = Struct((ROWS, INPUTS), jnp.float32)
    params = jax.eval_shape(lambda x: model.init(jax.random.key(0), x)["params"], x)
    return _step(lambda params, x: model.apply({"params": params}, x), params, INPUTS, "mixed_float16")


def _step(model: Callable[..., Any], params: Any, inputs: int, policy: str) -> tuple[Any, ...]:
    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model(params, batch["x"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    optimizer = jt.with_loss_scale(optax.adam(1e-3), jt.torch_loss_scale())
    if policy == "autocast":
        step = jt.train_step(jt.stateless(jt.autocast(loss, jnp.float16)), optimizer)
    else:
        step = jt.train_step(jt.stateless(loss), optimizer, policy=jt.get_policy(policy))
    state = jax.eval_shape(lambda params: jt.TrainState.create(params, optimizer), params)
    batch = {"x": Struct((ROWS, inputs), jnp.float32), "y": Struct((ROWS,), jnp.int32)}
    return lambda state, batch: step(state, batch), (state, batch), KEPT
