"""A decoder in flax linen, as nanodo's: `nn.with_partitioning`, FSDP by shardings of `jax.jit`, `MultiSteps`."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scripts import Script, gradients_of, half_optimizer

MESH = Mesh(np.array(jax.devices()), ("data",))


@dataclasses.dataclass(frozen=True)
class DoConfig:
    D: int = 32
    H: int = 2
    L: int = 8
    N: int = 1
    V: int = 24
    F: int = 64
    dtype: Any = jnp.float32
    remat: bool = True


def fsdp_init(axis: int, rank: int) -> Any:
    names: list[str | None] = [None] * rank
    names[axis] = "data"
    return nn.with_partitioning(nn.initializers.xavier_uniform(), tuple(names))


class CausalAttn(nn.Module):
    cfg: DoConfig

    @nn.compact
    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        cfg = self.cfg
        Dh = cfg.D // cfg.H
        multilinear = partial(
            nn.DenseGeneral,
            axis=-1,
            features=(cfg.H, Dh),
            kernel_init=fsdp_init(0, 3),
            use_bias=False,
            dtype=cfg.dtype,
        )
        q_BxLxHxDh = multilinear(name="query")(x_BxLxD) / Dh**0.5
        k_BxLxHxDh = multilinear(name="key")(x_BxLxD)
        v_BxLxHxDh = multilinear(name="value")(x_BxLxD)
        att_BxHxLxL = jnp.einsum("...qhd,...khd->...hqk", q_BxLxHxDh, k_BxLxHxDh)
        att_BxHxLxL = att_BxHxLxL.astype(jnp.float32)
        mask_1x1xLxL = jnp.tril(jnp.ones((1, 1, cfg.L, cfg.L), dtype=jnp.bool_))
        att_BxHxLxL = jnp.where(mask_1x1xLxL, att_BxHxLxL, jnp.finfo(cfg.dtype).min)
        att_BxHxLxL = jax.nn.softmax(att_BxHxLxL, axis=-1).astype(cfg.dtype)
        out_BxLxHxDh = jnp.einsum("...hqk,...khd->...qhd", att_BxHxLxL, v_BxLxHxDh)
        return nn.DenseGeneral(
            features=cfg.D,
            name="attn_out_proj",
            axis=(-2, -1),
            kernel_init=fsdp_init(2, 3),
            use_bias=False,
            dtype=cfg.dtype,
        )(out_BxLxHxDh)


class TBlock(nn.Module):
    cfg: DoConfig

    @nn.compact
    def __call__(self, in_BxLxD: jax.Array) -> jax.Array:
        cfg = self.cfg
        norm = partial(nn.LayerNorm, dtype=cfg.dtype, use_bias=False)
        linear = partial(nn.Dense, use_bias=False, dtype=cfg.dtype)
        x_BxLxD = CausalAttn(cfg)(norm()(in_BxLxD)) + in_BxLxD
        z_BxLxF = jax.nn.gelu(linear(cfg.F, kernel_init=fsdp_init(0, 2))(norm()(x_BxLxD)))
        return x_BxLxD + linear(cfg.D, kernel_init=fsdp_init(0, 2))(z_BxLxF)


class TransformerDo(nn.Module):
    cfg: DoConfig

    @nn.compact
    def __call__(self, y_BxL: jax.Array) -> jax.Array:
        cfg = self.cfg
        embed = nn.Embed(cfg.V, cfg.D, embedding_init=fsdp_init(1, 2))
        pos_embed = nn.Embed(cfg.L, cfg.D, embedding_init=fsdp_init(1, 2))
        y_BxLxD = embed(y_BxL) + pos_embed(jnp.arange(y_BxL.shape[1])[None])
        block: Any = nn.remat(TBlock) if cfg.remat else TBlock
        for _ in range(cfg.N):
            y_BxLxD = block(cfg)(y_BxLxD)
        y_BxLxD = nn.LayerNorm(dtype=cfg.dtype, use_bias=False)(y_BxLxD)
        return embed.attend(y_BxLxD.astype(jnp.float32))


MODEL = TransformerDo(DoConfig())


def loss_fn(params: Any, in_BxL: jax.Array) -> jax.Array:
    inputs_BxL = jnp.pad(in_BxL, ((0, 0), (1, 0)))[:, :-1]
    logits_BxLxV: Any = MODEL.apply({"params": params}, inputs_BxL)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, in_BxL)
    return losses.mean()


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(1, 24, (16, 8)), jnp.int32)


def optimizer(half: bool) -> Any:
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = optax.MultiSteps(tx, every_k_schedule=1)
    return half_optimizer(tx if half else tx.gradient_transformation(), half)


@functools.cache
def script(half: bool) -> Script:
    def init(rng: jax.Array, inputs: jax.Array) -> Any:
        params = MODEL.init(rng, inputs)["params"]
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optimizer(half))

    abstract = jax.eval_shape(init, jax.random.PRNGKey(0), tokens()[:1])
    shardings = nn.get_sharding(abstract, MESH)
    state = jax.jit(init, out_shardings=shardings)(jax.random.PRNGKey(0), tokens()[:1])

    @partial(
        jax.jit,
        in_shardings=(shardings, NamedSharding(MESH, P())),
        out_shardings=(shardings, NamedSharding(MESH, P())),
    )
    def train_step(state: Any, in_BxL: jax.Array) -> Any:
        in_BxL = jax.lax.with_sharding_constraint(in_BxL, NamedSharding(MESH, P("data")))
        loss, grads = gradients_of(loss_fn, half)(state.opt_state, state.params, in_BxL)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = optax.tree.get(opt_state, "gradient_step")
        return state.replace(step=step, params=params, opt_state=opt_state), loss

    return Script(state, train_step, tokens())


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, tokens()
