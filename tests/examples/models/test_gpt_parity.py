"""Generation of the GPT with its cache beside its full forward pass, in float32 and in half precision."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import gpt
from models.causal_attention import ROPE_BASE
from models.gpt import GPT, GPTConfig, empty_cache
from promotion import promoting

import jmp_train as jt

pytestmark = pytest.mark.full

CONFIG = GPTConfig(width=32, depth=2, heads=4, kv_heads=2, mlp=64, vocabulary=29)
GRAPHDEF = nnx.graphdef(nnx.eval_shape(lambda: GPT(CONFIG, nnx.Rngs(0))))
SEEDS, TEXTS, LENGTH = 3, 4, 16


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def trained(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of all tokens but the first, by the full forward pass."""
    return chosen(nnx.merge(GRAPHDEF, params)(tokens[:, :-1]), tokens[:, 1:])


def sampled(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the same, token by token with a cache."""
    model = nnx.merge(GRAPHDEF, params)

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = model.extend(token[:, None], cache)
        return cache, logits[:, 0]

    _, logits = jax.lax.scan(step, empty_cache(model, *tokens.shape), tokens[:, :-1].T)
    return chosen(logits.swapaxes(0, 1), tokens[:, 1:])


def in_dtype(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    def run(params: Any, tokens: jax.Array) -> Any:
        return fn(jax.tree.map(lambda x: x.astype(dtype), params), tokens)

    return promoting(run)


@pytest.fixture(name="args", scope="module")
def fixture_args() -> tuple[Any, jax.Array]:
    """Parameters and texts of three seeds, stacked; random everywhere, of the size that training leads to."""
    shapes = nnx.state(nnx.eval_shape(lambda: GPT(CONFIG, nnx.Rngs(0))), nnx.Param)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.2, (SEEDS, *x.shape)), jnp.float32), shapes)
    return params, jnp.asarray(random.integers(0, CONFIG.vocabulary, (SEEDS, TEXTS, LENGTH), np.int32))


def mismatches(args: tuple[Any, jax.Array], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each seed the mean mismatch and how far training is from float32 on the mean."""
    both = (jax.jit(jax.vmap(in_dtype(fn, dtype)))(*args) for fn in (trained, sampled))
    train, infer = (np.asarray(x, np.float64) for x in both)
    exact = np.asarray(jax.jit(jax.vmap(in_dtype(trained, jnp.float32)))(*args), np.float64)
    return np.abs(train - infer).mean((1, 2)), np.abs(train - exact).mean((1, 2))


def test_float16_differs_by_a_quarter_of_bfloat16_at_most_and_both_by_less_than_they_round(args: Any) -> None:
    half, rounded = mismatches(args, jnp.float16)
    brain, brain_rounded = mismatches(args, jnp.bfloat16)
    assert (half <= brain / 4).all()
    assert (half <= rounded).all()
    assert (brain <= brain_rounded).all()
    assert brain.min() > 1e-4


def norm_with_another_epsilon(self: gpt.RMSNorm, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-2)  # planted
    return (y * scale * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def attention_with_half_softmax(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    query = query.astype(key.dtype)
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) / query.shape[-1] ** 0.5
    scores = jnp.where(seen, scores, -jnp.inf)
    probs = jax.nn.softmax(scores.astype(query.dtype))  # planted
    return jnp.einsum("bnts,bsnh->btnh", probs, value)


def rotations_in_half(positions: jax.Array, head_size: int) -> gpt.Rotation:
    frequencies = ROPE_BASE ** -(np.arange(0, head_size, 2) / head_size)
    angles = positions.astype(jnp.bfloat16)[:, None] * frequencies.astype(jnp.bfloat16)  # planted
    return gpt.Rotation(jnp.cos(angles), jnp.sin(angles))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("owner", "name", "planted", "kind"),
    [
        (gpt.RMSNorm, "__call__", norm_with_another_epsilon, "value"),
        (gpt, "cached_attention", attention_with_half_softmax, "rounding"),
        (gpt, "rotations", rotations_in_half, "rounding"),
    ],
)
def test_a_sampler_that_computes_otherwise_is_found_on_its_line(
    args: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    planted: Callable[..., Any],
    kind: str,
    dtype: Any,
) -> None:
    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, planted)
            return sampled(params, tokens)

    first_seed = jax.tree.map(lambda x: x[0], args)
    report = jt.parity(jax.jit(in_dtype(trained, dtype)), jax.jit(in_dtype(infer, dtype)), *first_seed)
    first = report.first_difference
    assert first is not None
    assert first.infer is not None
    assert first.infer.file == __file__
    code = planted.__code__
    assert code.co_firstlineno < first.infer.line < code.co_firstlineno + 8
    assert first.kind == kind
    if name != "rotations":
        assert "# planted" in first.infer.code


def test_the_last_position_of_a_longer_cache_is_no_difference(args: Any) -> None:
    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(GRAPHDEF, params)
        cache = empty_cache(model, len(tokens), 3 * LENGTH)
        first, cache = model.extend(tokens[:, :5], cache)
        rest, _ = model.extend(tokens[:, 5:-1], cache)
        return chosen(jnp.concatenate([first, rest], axis=1), tokens[:, 1:])

    first_seed = jax.tree.map(lambda x: x[0], args)
    report = jt.parity(*(jax.jit(in_dtype(fn, jnp.float32)) for fn in (trained, infer)), *first_seed)
    assert report.maximum < 1e-5
    assert report.first_difference is None
