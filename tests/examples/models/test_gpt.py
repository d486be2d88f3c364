"""The transformer of text beside a float64 one written out, its positions, and generation with a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.causal_attention import Rotation, rotated, rotations
from models.gpt import GPT, Cache, GPTConfig, empty_cache, generate
from promotion import promoting

import jmp_train as jt

pytestmark = pytest.mark.quick

CONFIG = GPTConfig(width=16, depth=2, heads=4, kv_heads=2, mlp=24, vocabulary=11)
GRAPHDEF = nnx.graphdef(nnx.eval_shape(lambda: GPT(CONFIG, nnx.Rngs(0))))
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocabulary, (3, 9), np.int32)
FAR = 100_000


@pytest.fixture(name="params", scope="module")
def fixture_params() -> Any:
    """Parameters that are random everywhere, float32."""
    shapes = nnx.state(nnx.eval_shape(lambda: GPT(CONFIG, nnx.Rngs(0))), nnx.Param)
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.4, x.shape), jnp.float32), shapes)


def forward(params: Any, tokens: Any, graphdef: Any = GRAPHDEF) -> jax.Array:
    return promoting(nnx.merge(graphdef, params))(tokens)


@promoting
def token_by_token(params: Any, tokens: Any, prompt: int) -> jax.Array:
    """Returns the logits of a model that is given a prompt and then one token after the other."""
    model = nnx.merge(GRAPHDEF, params)
    logits, cache = model.extend(tokens[:, :prompt], empty_cache(model, *tokens.shape))

    def step(cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
        logits, cache = model.extend(token[:, None], cache)
        return cache, logits[:, 0]

    _, rest = jax.lax.scan(step, cache, tokens[:, prompt:].T)
    return jnp.concatenate([logits, rest.swapaxes(0, 1)], axis=1)


def exact_angles(positions: np.ndarray, head_size: int) -> np.ndarray:
    return positions[:, None].astype(np.float64) * 10_000.0 ** -(np.arange(0, head_size, 2) / head_size)


def reference(params: Any, tokens: np.ndarray, config: GPTConfig) -> np.ndarray:
    """Returns the logits in float64, from the equations of Llama's paper, text by text and head by head."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    size, shared_by = config.head_size, config.heads // config.kv_heads
    angles = exact_angles(np.arange(tokens.shape[1]), size)
    hidden = np.triu(np.full((tokens.shape[1],) * 2, -np.inf), 1)

    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * layer["scale"]

    def turn(x: np.ndarray) -> np.ndarray:
        z = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], axis=-1)

    def attend(layer: Any, x: np.ndarray) -> np.ndarray:
        query, key, value = (x @ layer[name]["kernel"] for name in ("query", "key", "value"))
        outs = []
        for head in range(config.heads):
            own, shared = (slice(n * size, (n + 1) * size) for n in (head, head // shared_by))
            scores = turn(query[:, own]) @ turn(key[:, shared]).T / np.sqrt(size) + hidden
            exp = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(exp / exp.sum(-1, keepdims=True) @ value[:, shared])
        return np.concatenate(outs, axis=-1) @ layer["out"]["kernel"]

    def swiglu(layer: Any, x: np.ndarray) -> np.ndarray:
        gate = x @ layer["gate"]["kernel"]
        return gate / (1 + np.exp(-gate)) * (x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]

    def logits(text: np.ndarray) -> np.ndarray:
        x = p["embedding"][text]
        for number in range(config.depth):
            block = p["blocks"][number]
            x = x + attend(block["attention"], norm(block["attention_norm"], x))
            x = x + swiglu(block["mlp"], norm(block["mlp_norm"], x))
        return norm(p["norm"], x) @ p["embedding"].T

    return np.stack([logits(text) for text in tokens])


def test_logits_are_those_of_the_equations(params: Any) -> None:
    expected = reference(params, TOKENS, CONFIG)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(jax.jit(forward)(params, TOKENS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_remat_recomputes_the_blocks_and_changes_no_gradient(params: Any) -> None:
    config = dataclasses.replace(CONFIG, remat=True)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))

    def gradient_and_saved(graphdef: Any) -> tuple[Any, int]:
        out, pullback = jax.vjp(lambda params: (forward(params, TOKENS, graphdef) ** 2).mean(), params)
        return pullback(jnp.ones_like(out))[0], sum(x.size for x in jax.tree.leaves(pullback))

    (found, saved), (wanted, plainly_saved) = map(gradient_and_saved, (graphdef, GRAPHDEF))
    assert saved < plainly_saved / 3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, wanted)


POLICIES = ("mixed_float16", "mixed_bfloat16", "half", "params=bfloat16,compute=bfloat16,output=bfloat16")


@pytest.mark.parametrize("name", ["float32", *POLICIES, "autocast_float16", "autocast_bfloat16"])
def test_angles_are_exact_at_position_100_000_under_every_policy(name: str) -> None:
    positions = np.array([0, 1, 257, 2049, 65_535, FAR, FAR + 1])

    def bits(positions: jax.Array, x: jax.Array) -> Any:
        # Integers are not cast, and those of a half type would have 16 bits.
        rotation = rotations(positions, 32)
        return jax.tree.map(lambda y: jax.lax.bitcast_convert_type(y, jnp.int32), rotation), x @ x

    found, product = jax.jit(jt.apply_policy(bits, jt.get_policy(name)))(positions, jnp.ones((2, 2)))
    assert product.dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    angles = exact_angles(positions, 32)
    for integers, exact in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
        assert integers.dtype == jnp.int32
        np.testing.assert_allclose(np.asarray(integers).view(np.float32), exact, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_rotations_within_autocast_are_float32_and_their_products_exact(dtype: Any) -> None:
    positions = np.arange(FAR, FAR + 5, dtype=np.int32)
    heads = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)

    def turned(x: jax.Array, weights: jax.Array) -> Any:
        rotation = rotations(jnp.asarray(positions), 8)
        return rotation, rotated(x @ weights, rotation)

    rotation, out = jax.jit(jt.autocast(turned, dtype))(heads, np.eye(8, dtype=np.float32))
    assert {x.dtype for x in rotation} == {jnp.dtype("float32")}
    z = (heads[..., :4] + 1j * heads[..., 4:]) * np.exp(1j * exact_angles(positions, 8))[:, None]
    exact = np.concatenate([z.real, z.imag], axis=-1)
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 4 * float(jnp.finfo(dtype).eps)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("prompt", [1, 5])
def test_cached_logits_are_those_of_the_full_forward_pass(params: Any, prompt: int) -> None:
    full = jax.jit(forward)(params, TOKENS)
    cached = jax.jit(token_by_token, static_argnums=2)(params, TOKENS, prompt)
    np.testing.assert_allclose(cached, full, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_cached_logits_in_half_differ_by_less_than_rounding_does(params: Any, dtype: Any) -> None:
    half = jax.tree.map(lambda x: x.astype(dtype), params)
    exact = reference(half, TOKENS, CONFIG)
    full = np.asarray(jax.jit(forward)(half, TOKENS), np.float64)
    cached = jax.jit(token_by_token, static_argnums=2)(half, TOKENS, 4)
    assert cached.dtype == dtype
    rounding = np.abs(full - exact)
    assert rounding.mean() < 16 * float(jnp.finfo(dtype).eps)
    difference = np.abs(np.asarray(cached, np.float64) - full)
    assert difference.mean() <= rounding.mean()
    assert difference.max() <= 2 * rounding.max()


@pytest.mark.full
@pytest.mark.parametrize("drawn", [False, True])
def test_generated_tokens_are_those_of_the_full_forward_pass(params: Any, drawn: bool) -> None:
    n, prompt = 6, jnp.asarray(TOKENS[:, :3])
    rng = jax.random.key(7) if drawn else None
    found = jax.jit(promoting(lambda params: generate(nnx.merge(GRAPHDEF, params), prompt, n, rng)))(params)
    assert (found.tokens.shape, found.tokens.dtype, found.log_probs.dtype) == ((3, n), jnp.int32, jnp.float32)
    logits = jax.jit(forward)(params, np.concatenate([prompt, found.tokens], axis=1))
    log_probs = np.asarray(jax.nn.log_softmax(logits))[:, 2:-1]
    tokens = np.asarray(found.tokens)
    chosen = np.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.log_probs, chosen, rtol=1e-5, atol=1e-5)
    assert (tokens == log_probs.argmax(-1)).all() == (not drawn)


@pytest.mark.full
def test_tokens_are_drawn_by_their_probabilities(params: Any) -> None:
    texts = 4000
    prompt = jnp.tile(jnp.asarray(TOKENS[:1, :3]), (texts, 1))

    def drawn(params: Any, rng: jax.Array) -> jax.Array:
        return generate(nnx.merge(GRAPHDEF, params), prompt, 1, rng).tokens[:, 0]

    run = jax.jit(promoting(drawn))
    counts = np.bincount(run(params, jax.random.key(0)), minlength=CONFIG.vocabulary)
    shares = np.exp(reference(params, TOKENS[:1, :3], CONFIG)[0, -1])
    shares /= shares.sum()
    np.testing.assert_allclose(counts / texts, shares, atol=5 * 0.5 / np.sqrt(texts))
    assert (run(params, jax.random.key(1)) != run(params, jax.random.key(0))).any()


def test_a_cache_has_the_models_dtype_and_counts_its_tokens(params: Any) -> None:
    model = nnx.merge(GRAPHDEF, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    cache = jax.eval_shape(lambda: empty_cache(model, 2, 7))
    assert isinstance(cache, Cache)
    assert {(x.shape, x.dtype.name) for x in cache.keys + cache.values} == {((2, 7, 2, 4), "bfloat16")}
    assert len(cache.keys) == len(cache.values) == CONFIG.depth
    assert isinstance(rotations(jnp.arange(2), 4), Rotation)


@pytest.mark.full
def test_all_dense_layers_of_the_blocks_can_be_in_8_bits(params: Any) -> None:
    rules = jt.TORCH_CUDA.replace(paths={"attention|mlp": "fp8"})
    shapes = jax.eval_shape(lambda: params)
    report = jt.explain_autocast(jt.autocast(forward, jnp.bfloat16, rules=rules), shapes, TOKENS)
    in_blocks = [row.rule for row in report.operations if row.operation == "dot_general" and "block_" in row.path]
    assert in_blocks == ["fp8"] * 7 * CONFIG.depth
