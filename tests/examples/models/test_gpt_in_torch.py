"""The training step of `lm` beside the same in torch, with the same weights; where torch is not installed, skipped.

Torch's is written as its documentation advises: `scaled_dot_product_attention`, `rms_norm` and `cross_entropy` of
`torch.nn.functional`, the rotation of queries and keys in float32 as in Meta's Llama.
"""

import dataclasses
import importlib.util
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import lm
import numpy as np
import pytest
from flax import nnx
from models.causal_attention import ROPE_BASE
from models.gpt import GPTConfig
from promotion import promoting

from jmp_train import TORCH_CPU, apply_policy, get_policy

pytestmark = pytest.mark.full

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not there: install it to compare", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch  # pyright: ignore[reportMissingImports]
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

CONFIG = GPTConfig(width=64, depth=3, heads=4, kv_heads=2, mlp=176)
BATCH, TOKENS, SEEDS = 8, 128, 8
AUTOCAST = get_policy("autocast_bfloat16")
OURS = {
    "float32": get_policy("float32"),
    "by CUDA's rules": AUTOCAST,
    "by the CPU's rules": dataclasses.replace(AUTOCAST, rules=TORCH_CPU),
}
Grads = dict[str, np.ndarray]


def named(state: Any) -> Grads:
    """Returns a model's arrays by names such as blocks.0.mlp.gate.kernel."""
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(state)}


def example(seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns initial parameters, with scales that are not all 1, and a batch of the documentation."""
    random = np.random.default_rng(seed)
    params, _ = lm.init(jax.random.key(seed), CONFIG)

    def moved(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype) if x.ndim == 1 else x

    windows = lm.windows(lm.documentation(), TOKENS)
    rows = random.choice(len(windows["token"]), BATCH, replace=False)
    return jax.tree.map(moved, params), lm.prepare({name: x[rows] for name, x in windows.items()})


def turned(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def torch_logits(p: dict[str, Any], tokens: Any) -> Any:
    size = CONFIG.head_size
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = torch.arange(TOKENS, dtype=torch.float64)[:, None] * ROPE_BASE**-exponents
    dtype = p["embedding"].dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def norm(name: str, x: Any) -> Any:
        return F.rms_norm(x, (CONFIG.width,), p[f"{name}.scale"], 1e-5)

    def linear(name: str, x: Any) -> Any:
        return F.linear(x, p[f"{name}.kernel"])

    x = F.embedding(tokens, p["embedding"])
    for block in (f"blocks.{number}" for number in range(CONFIG.depth)):
        y = norm(f"{block}.attention_norm", x)
        projected = [linear(f"{block}.attention.{name}", y) for name in ("query", "key", "value")]
        query, key, value = (heads.unflatten(-1, (-1, size)).transpose(1, 2) for heads in projected)
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + linear(f"{block}.attention.out", y.transpose(1, 2).flatten(2))
        y = norm(f"{block}.mlp_norm", x)
        x = x + linear(f"{block}.mlp.down", F.silu(linear(f"{block}.mlp.gate", y)) * linear(f"{block}.mlp.up", y))
    return F.linear(norm("norm", x), p["embedding"])


def torchs(params: Any, batch: dict[str, np.ndarray], dtype: Any, autocast: bool = False) -> tuple[float, Grads]:
    """Returns torch's loss and gradients; a linear layer's weights are our kernel's transpose."""

    def weights(name: str, x: np.ndarray) -> Any:
        x = x.T if name.endswith(".kernel") else x
        return torch.tensor(x, dtype=dtype, requires_grad=True)

    p = {name: weights(name, x) for name, x in named(params).items()}
    tokens, labels = (torch.tensor(batch[name]).long() for name in ("token", "label"))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(torch_logits(p, tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: x.grad.double().numpy() for name, x in p.items()}
    return loss.item(), {name: x.T if name.endswith(".kernel") else x for name, x in grads.items()}


def distance(grads: Grads, exact: Grads) -> float:
    """Returns the length of the difference as a share of the length."""
    squares = [(np.sum((grads[name] - x) ** 2), np.sum(x**2)) for name, x in exact.items()]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@pytest.fixture(name="steps", scope="module")
def fixture_steps() -> list[dict[str, tuple[float, float]]]:
    """The loss, and the gradients' distance from torch's in float64, of each way and for each seed."""

    def ours(policy: Any) -> Any:
        loss = apply_policy(lambda p, batch: promoting(lm.loss_fn)(p, {}, batch, None, CONFIG)[0], policy)
        return jax.jit(jax.value_and_grad(loss))

    ways = {name: ours(policy) for name, policy in OURS.items()}
    steps = []
    for params, batch in map(example, range(SEEDS)):
        found = {name: step(params, batch) for name, step in ways.items()}
        found = {name: (float(loss), named(grads)) for name, (loss, grads) in found.items()}
        found["torch autocast"] = torchs(params, batch, torch.float32, autocast=True)
        found["torch"] = torchs(params, batch, torch.float32)
        _, exact = torchs(params, batch, torch.float64)
        steps.append({name: (loss, distance(grads, exact)) for name, (loss, grads) in found.items()})
    return steps


def test_the_loss_and_the_gradients_in_float32_are_torchs(steps: list[dict[str, tuple[float, float]]]) -> None:
    for step in steps:
        assert step["float32"][0] == pytest.approx(step["torch"][0], abs=1e-5)
        assert step["float32"][1] < 2e-6
        assert step["torch"][1] < 2e-6


@pytest.mark.parametrize("rules", ["by CUDA's rules", "by the CPU's rules"])
def test_the_gradients_in_bfloat16_are_as_near_float64s_as_torchs(
    steps: list[dict[str, tuple[float, float]]], rules: str
) -> None:
    # Over the seeds, as each single one is as much chance as rounding.
    of_ours, of_torchs = (np.sqrt(np.mean([step[way][1] ** 2 for step in steps])) for way in (rules, "torch autocast"))
    assert 1e-3 < of_ours <= of_torchs
