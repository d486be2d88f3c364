"""The exchange of rows between the parts of a graph: dtypes, gradients in float32, misuse."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]

PARTS = 8
# The first node sends to all, itself included.
STAR = graphs.from_edges([0] * PARTS, range(PARTS), PARTS)


def on_parts(run: Any, *, parts: int = PARTS, axis: str = "data", **options: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:parts]), (axis,))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(axis), out_specs=P(axis), **options))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_gradients_of_what_was_sent_are_added_in_float32(check_vma: bool) -> None:
    cut = graphs.partition(STAR, PARTS, method="ranges")

    def gradient(parts: Any, rows: jax.Array, weights: jax.Array) -> jax.Array:
        part, weight = parts[0], weights[0]

        def total(rows: jax.Array) -> jax.Array:
            seen = part.with_halo(rows)
            own, halo = seen[0], seen[1:].sum()  # each part has one row and sees that of the first at most
            return ((own + halo) * weight).sum()

        return jax.grad(total)(rows)

    # Seven ones and 2048: a running sum in float16 stays at 2048, rounding each step.
    weights = np.array([2048] + [1] * (PARTS - 1), np.float16)
    rows = np.arange(1, PARTS + 1).astype(np.float16)[:, None]
    found = on_parts(gradient, check_vma=check_vma)(cut.parts, cut.take(rows), weights)
    assert found.dtype == jnp.float16
    assert found.ravel().tolist() == [2056, *[1] * (PARTS - 1)]  # 2055 lies between 2054 and 2056


def sent_dtypes(run: Any, *arguments: Any) -> list[str]:
    """Returns the dtypes of all exchanges of a function's program, in their order."""
    text = str(jax.make_jaxpr(run)(*arguments))
    return re.findall(r":(\w+)\[[\d,]*\]\S* = all_to_all", text)


def test_half_is_sent_as_half_forward_and_backward() -> None:
    cut = graphs.partition(STAR, 2, method="ranges")
    weight = jnp.ones((3, 2))

    def gradient(wrap: Any) -> Any:
        def run(parts: Any, rows: jax.Array) -> jax.Array:
            def loss(weight: jax.Array, rows: jax.Array) -> jax.Array:
                logits = graphs.graph_conv(parts[0], rows, weight, allow_zero_in_degree=True)
                return logits.astype(jnp.float32).sum()

            return jax.grad(wrap(loss))(jt.policies.pvary(weight, ("data",)).astype(rows.dtype), rows)

        return on_parts(run, parts=2)

    rows = np.ones((PARTS, 3), np.float32)
    assert sent_dtypes(gradient(lambda loss: loss), cut.parts, cut.take(rows)) == ["f32", "f32"]
    assert sent_dtypes(gradient(lambda loss: loss), cut.parts, cut.take(rows.astype(np.float16))) == ["f16", "f16"]
    assert sent_dtypes(gradient(jt.autocast), cut.parts, cut.take(rows)) == ["f16", "f16"]


def test_misuse_is_named() -> None:
    cut = graphs.partition(STAR, 2, method="ranges")
    rows = cut.take(np.ones((PARTS, 1)))

    def run(parts: Any, rows: jax.Array) -> jax.Array:
        return parts[0].with_halo(rows)

    with pytest.raises(
        ValueError, match=r"mesh axis 'data' has 4 devices, but the graph has 2 parts: one per device is needed"
    ):
        doubled = jax.tree.map(lambda x: np.concatenate([x, x]), cut.parts)
        on_parts(run, parts=4)(doubled, np.concatenate([rows, rows]))
    with pytest.raises(ValueError, match=r"the part belongs to mesh axis 'data': use it within jax\.shard_map"):
        on_parts(run, parts=2, axis="model")(cut.parts, rows)
    with pytest.raises(ValueError, match=r"the part belongs to mesh axis 'data'"):
        cut.parts[0].with_halo(rows[:4])
    with pytest.raises(ValueError, match=r"features must have 4 rows, one for each of the part's own nodes, got shape"):
        on_parts(run, parts=2)(cut.parts, rows[:6])
