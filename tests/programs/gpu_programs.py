"""Builders for `compile_for_gpu`, which runs in an environment without pytest."""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import ShapeDtypeStruct as Struct
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

NODES, EDGES, FEATURES = 500, 20_000, 64


def messages(returned: str) -> tuple[Any, ...]:
    """Sums weighted features over edges; returns the messages too if asked to."""

    def f(x: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> Any:
        message = x[senders] * w[:, None]
        total = jax.ops.segment_sum(message, receivers, NODES)
        return total if returned == "sum" else (total, message)

    index = Struct((EDGES,), jnp.int32)
    x, w = Struct((NODES, FEATURES), jnp.float32), Struct((EDGES,), jnp.float32)
    return f, (x, w, index, index)


def fused_pairs(dtype: str, most_edges_of_a_node: str) -> tuple[Any, ...]:
    """Passes messages by every fused pair, with the gradients of the features and the weights."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES, (2, EDGES))
    senders[: int(most_edges_of_a_node)] = receivers[-int(most_edges_of_a_node) :] = 0
    graph = graphs.from_edges(senders, receivers, NODES, formats=("coo",))

    def f(graph: graphs.Graph, h: jax.Array, w: jax.Array) -> Any:
        def run(message: fn.Message, reducer: Any, h: jax.Array, w: jax.Array) -> jax.Array:
            whole = graph.with_nodes(h=h).with_edges(w=w)
            return graphs.update_all(whole, message, reducer("m", "x")).nodes["x"]

        results = []
        for message in (fn.copy_u("h", "m"), fn.u_mul_e("h", "w", "m")):
            for reducer in (fn.sum, fn.mean):
                out, pullback = jax.vjp(functools.partial(run, message, reducer), h, w)
                results.append((out, pullback(jnp.tanh(out))))
        return results

    return f, (graph, Struct((NODES, FEATURES), dtype), Struct((EDGES, 1), dtype))


GAT_NODES, GAT_EDGES = 30_000, 3_000_000  # many chunks of edges


def attention(name: str, dtype: str) -> tuple[Any, ...]:
    """Computes attention of two heads with dropout in chunks, and its gradients."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, GAT_NODES, (2, GAT_EDGES))
    graph = graphs.from_edges(senders, receivers, GAT_NODES, formats=("csr",))
    key = jax.eval_shape(lambda: jax.random.key(0))

    def f(graph: graphs.Graph, key: jax.Array, *arrays: jax.Array) -> Any:
        attend = graphs.gat_attention if name == "gat" else graphs.gatv2_attention
        run = functools.partial(attend, graph, dropout_rate=0.5, dropout_key=key)
        out, pullback = jax.vjp(run, *arrays)
        return out, pullback(jnp.tanh(out))

    rows, end = Struct((GAT_NODES, 2, 16), dtype), Struct((GAT_NODES, 2), "float32")
    arrays = (rows, end, end) if name == "gat" else (rows, rows, Struct((2, 16), "float32"))
    return f, (graph, key, *arrays)


def half_gradient(mesh: Mesh) -> tuple[Any, ...]:
    """Differentiates a loss in float16 over a batch that all devices share."""

    def loss(w: jax.Array, batch: jax.Array) -> jax.Array:
        y = batch.astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    shared = NamedSharding(mesh, PartitionSpec("data"))
    batch = Struct((512, 256), jnp.float32, sharding=shared)
    return jax.grad(loss), (Struct((256, 128), jnp.float32), batch)


def loop(size: str) -> tuple[Any, ...]:
    """Multiplies a donated float16 matrix ten times by another one."""

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, c: jnp.tanh(c @ b), a)

    matrix = Struct((int(size), int(size)), jnp.float16)
    return f, (matrix, matrix), {"donate_argnums": 0}


def environment(*names: str) -> Any:
    """Fails, and says which environment variables the process has."""
    raise LookupError({name: os.environ.get(name) for name in names})


def nothing() -> None:
    """Returns no program."""


WIDTH, LAYERS = 2048, 4  # the gradients of two layers are more than XLA reduces in one piece


def parallel_step(route: str, accumulate_steps: str, mesh: Mesh) -> tuple[Any, ...]:
    """Makes a step of mixed_float16 on all GPUs of a mesh, with batch statistics of each layer."""
    optimizer = jt.with_loss_scale(optax.adam(1e-3), jt.torch_loss_scale())

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        rows, statistics = batch["x"], []
        for weight, running in zip(params, model_state, strict=True):
            float32_rows = (rows @ weight).astype(jnp.float32)
            mean, var = float32_rows.mean(0), float32_rows.var(0)
            new = {"mean": mean, "var": var}
            statistics.append(jax.tree.map(lambda old, x: 0.9 * old + 0.1 * x, running, new))
            rows = jax.nn.relu((float32_rows - mean) * jax.lax.rsqrt(var + 1e-5)).astype(weight.dtype)
        return (rows.astype(jnp.float32) ** 2).mean(), (statistics, None)

    def create() -> jt.TrainState:
        params = [jnp.zeros((WIDTH, WIDTH)) for _ in range(LAYERS)]
        statistics = [{"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)} for _ in range(LAYERS)]
        return jt.TrainState.create(params, optimizer, model_state=statistics)

    step = jt.train_step(loss_fn, optimizer, policy="mixed_float16", accumulate_steps=int(accumulate_steps))
    routes = {
        "shard_map": lambda: jt.data_parallel(step, mesh),
        "pmap": lambda: jt.pmap_step(step, devices=list(mesh.devices.flat)),
        "jit": lambda: jt.sharded_step(step, mesh),
    }
    data = NamedSharding(mesh, PartitionSpec("data"))
    batch = {"x": Struct((1024, WIDTH), jnp.float32, sharding=data)}
    return routes[route](), (jax.eval_shape(create), batch), {"donate_argnums": 0}


def model_parallel_step(form: str, mode: str, mesh: Mesh) -> tuple[Any, ...]:
    """Makes a step of residual blocks on all GPUs of a mesh, with a state that is sharded in one of three forms."""
    optimizer = optax.adam(1e-3)
    amp = jt.amp_from_config({"fp16": {"mode": mode.split("-")[0], **_level(mode)}})
    amp = dataclasses.replace(amp, batch_norms=())

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        x = batch["x"].astype(params["up0"].dtype)
        for layer in range(LAYERS):
            hidden = jax.nn.relu(_dense(x, params[f"up{layer}"]))
            x = x + _dense(hidden, params[f"down{layer}"])
        return (x.astype(jnp.float32) ** 2).mean(), (model_state, None)

    loss_fn, optimizer = amp.transform(loss_fn, optimizer)

    def create() -> jt.TrainState:
        params = {f"{name}{layer}": jnp.zeros((WIDTH, WIDTH)) for layer in range(LAYERS) for name in ("up", "down")}
        return jt.TrainState.create(params, optimizer, cast_params=amp.cast_params)

    state = jax.eval_shape(create)
    step = jt.train_step(loss_fn, optimizer)
    if form == "tensor":
        mesh = Mesh(mesh.devices.reshape(-1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        rules = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")}
        specs = jt.parallel.specs_by_path(state.params, rules)
        shardings = jt.parallel.state_shardings(state, mesh, params=specs)
    elif form == "zero1":
        shardings = jt.zero1_shardings(state, mesh)
    else:
        shardings = jt.fsdp_shardings(state, mesh)
    data = NamedSharding(mesh, PartitionSpec("data"))
    batch = {"x": Struct((1024, WIDTH), jnp.float32, sharding=data)}
    state = jax.tree.map(lambda x, where: Struct(x.shape, x.dtype, sharding=where), state, shardings)
    return jt.sharded_step(step, mesh, shardings=shardings), (state, batch), {"donate_argnums": 0}


def _level(mode: str) -> dict[str, str]:
    return {"opt_level": mode.split("-")[1]} if "-" in mode else {}


def _dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jt.policies.float32_dot_general(x, kernel, (((1,), (0,)), ((), ())))


def fp8_layer(recipe: str, *, batch: int = 4) -> tuple[Any, ...]:
    """Makes a train step of two dense layers in 8 bits, with the gradients of all but the batch: 5 products.

    Args:
      recipe: the name of a recipe's class.
      batch: sequences.
    """

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["w"] + params["b"])
        return ((hidden @ params["v"]).astype(jnp.float32) ** 2).mean()

    rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=getattr(jt.policies, recipe)())
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss), optimizer, policy=policy)
    shapes = {"w": (512, 1024), "b": (1024,), "v": (1024, 256)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    state = jt.TrainState.create(params, optimizer)
    examples = Struct((batch, 256, 512), jnp.float32)
    return step, (jt.steps.with_fp8_state(step, state, examples) if recipe == "DelayedScaling" else state, examples)


def convolutions(rule: Any) -> tuple[Any, ...]:
    """Makes a train step of four convolutions.

    Args:
      rule: the rule of autocast for them, "lower" or "fp8".
    """
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers))
        return (x.astype(jnp.float32) ** 2).mean()

    rules = jt.TORCH_CUDA.replace(primitives={"conv_general_dilated": rule})
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules)
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss), optimizer, policy=policy)
    kernels = [jnp.zeros((3, 3, 64, 64))] * 4
    return step, (jt.TrainState.create(kernels, optimizer), Struct((16, 64, 64, 64), jnp.float32))


def autocast_products(dtype: str) -> tuple[Any, ...]:
    """Makes a convolution, a dense layer and attention under autocast, with gradients: 3 convolutions, 9 products.

    Args:
      dtype: of autocast; "float32" for none.
    """

    def loss(x: dict[str, jax.Array]) -> jax.Array:
        image = jax.lax.conv_general_dilated(
            x["image"], x["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        dense = jnp.tanh(image).reshape(len(image), -1) @ x["weight"]
        logits = jnp.einsum("bthd,bshd->bhts", x["query"], x["key"])
        attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), x["key"])
        return (dense.astype(jnp.float32) ** 2).mean() + (attended.astype(jnp.float32) ** 2).mean()

    def scaled(x: dict[str, jax.Array]) -> jax.Array:
        return 2.0**16 * loss(x)  # float16 has no gradients below 2**-24

    run = jax.value_and_grad(scaled if dtype == "float32" else jt.autocast(scaled, dtype))
    shapes = {
        "image": (16, 16, 16, 32),
        "kernel": (3, 3, 32, 64),
        "weight": (16 * 16 * 64, 128),
        "query": (4, 128, 4, 64),
        "key": (4, 128, 4, 64),
    }
    return run, ({name: Struct(shape, jnp.float32) for name, shape in shapes.items()},)


def dense_step(policy: str) -> tuple[Any, ...]:
    """Makes a step of eight dense layers on so many rows that activations are most of its memory."""
    optimizer = jt.with_loss_scale(optax.sgd(1e-3), jt.torch_loss_scale(enabled=policy == "mixed_float16"))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for weight in params:
            x = jnp.sin(x @ weight)  # whose gradient needs what the product gave
        return (x.astype(jnp.float32) ** 2).mean()

    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    params = [Struct((512, 512), jnp.float32) for _ in range(8)]
    state = jax.eval_shape(lambda params: jt.TrainState.create(params, optimizer), params)
    return step, (state, {"x": Struct((16_384, 512), jnp.float32)}), {"donate_argnums": 0}


def counted_layers() -> tuple[Any, ...]:
    """Makes the gradient of dense layers, convolutions, a loop and an embedding, each in a scope of its name.

    Inputs get no gradients.
    """

    def dense(x: jax.Array, weights: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.sin(x @ weight)
        return x

    def convolutions(image: jax.Array, strided: jax.Array, grouped: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(image, strided, (2, 2), ((1, 1), (1, 1)), dimension_numbers=numbers)
        y = jnp.sin(y)
        return jax.lax.conv_general_dilated(
            y, grouped, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=4
        )

    def loop(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (jnp.sin(x @ weight), None), x, weights)[0]

    def squares(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) ** 2).sum()

    def loss(p: dict[str, jax.Array], rows: jax.Array, image: jax.Array, tokens: jax.Array) -> jax.Array:
        half = {name: value.astype(jnp.float16) for name, value in p.items()}
        with jax.named_scope("dense"):
            total = squares(dense(rows, half["dense"]))
        with jax.named_scope("convolutions"):
            total += squares(convolutions(image, half["strided"], half["grouped"]))
        with jax.named_scope("loop"):
            total += squares(loop(rows, half["loop"]))
        with jax.named_scope("precise"):
            total += squares(jnp.dot(p["precise"], p["precise"].T, precision="highest"))
        with jax.named_scope("embedding"):
            return total + squares(jnp.sin(p["table"][tokens]))

    shapes = {
        "dense": (3, 512, 512),
        "strided": (3, 3, 32, 64),
        "grouped": (3, 3, 16, 128),
        "loop": (5, 512, 512),
        "precise": (256, 128),
        "table": (50_000, 64),
    }
    params = {name: Struct(shape, jnp.float32) for name, shape in shapes.items()}
    rows, image = Struct((2048, 512), jnp.float16), Struct((16, 32, 32, 32), jnp.float16)
    return jax.grad(loss), (params, rows, image, Struct((1000,), jnp.int32))


def gathered_layers(mesh: Mesh) -> tuple[Any, ...]:
    """Makes the gradient of layers whose weights are sharded: gathered in half, and reduced and scattered after."""

    def loss(weights: list[jax.Array], rows: jax.Array) -> jax.Array:
        for weight in weights:
            whole = jax.lax.all_gather(weight.astype(jnp.bfloat16), "data", tiled=True)
            rows = jnp.sin(rows @ whole)
        return jax.lax.pmean((rows.astype(jnp.float32) ** 2).sum(), "data")

    data = PartitionSpec("data")
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=([data] * LAYERS, data), out_specs=[data] * LAYERS)
    placed = NamedSharding(mesh, data)
    weights = [Struct((WIDTH, WIDTH), jnp.float32, sharding=placed) for _ in range(LAYERS)]
    return step, (weights, Struct((1024, WIDTH), jnp.bfloat16, sharding=placed))


def collective_operations(mesh: Mesh) -> tuple[Any, ...]:
    """Makes one collective operation of each kind, over one axis or both of four by two GPUs, on 1024 rows of each."""
    mesh = Mesh(mesh.devices.reshape(4, 2), ("a", "b"))
    both = PartitionSpec(("a", "b"))

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)])
        x = jax.lax.all_to_all(x, "a", 0, 0, tiled=True)
        x = jnp.sin(jax.lax.psum(jnp.sin(x), "b"))
        x = jax.lax.psum_scatter(x, "a", tiled=True)
        x = jax.lax.all_gather(jnp.sin(x), ("a", "b"), tiled=True)
        return x, jax.lax.pmax(jnp.sin(x), ("a", "b"))

    rows = Struct((8 * 1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, both))
    return jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=(both, both), check_vma=False), (rows,)
