"""What autocast does with every primitive of jax, which of them are only layout, and that none is wrong."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from primitive_lists import HOW

from jmp_train.policies.autocasting.primitives import COMPUTED, ENTERED, EXCHANGES, LAYOUT, PLACEMENT
from jmp_train.policies.autocasting.rules import TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

Array = Any

ALL_PRIMITIVES = """
import gc, jax, jax.numpy, jax.scipy, jax.experimental.pallas, jax.experimental.sparse, jax.extend.core
import jax.experimental.multihost_utils
print(*{x.name for x in gc.get_objects() if isinstance(x, jax.extend.core.Primitive)})
"""


def how(name: str) -> str:
    """Returns what the tables say about a primitive."""
    tables = {
        "entered": set(ENTERED),
        "converted": {"convert_element_type"},
        **{
            words: {name for name, rule in TORCH_CUDA.primitives if rule == word}
            for words, word in (("in half", "lower"), ("in float32", "float32"))
        },
        "each operand as it is": PLACEMENT | {"sort"},
        "moved": LAYOUT,
        "in the highest-precision type of its operands": COMPUTED,
        "exchanged between devices as it is": EXCHANGES,
    }
    return next((words for words, table in tables.items() if name in table), "as traced")


def test_each_primitive_is_treated_as_the_list_says() -> None:
    for words, listed in HOW.items():
        expected = "as traced" if words.startswith(("as traced", "without")) else words
        assert {name: how(name) for name in listed.split()} == dict.fromkeys(listed.split(), expected)


@pytest.mark.timeout(120)
def test_every_primitive_of_jax_is_on_the_list() -> None:
    command = [sys.executable, "-c", ALL_PRIMITIVES]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    listed = [name for names in HOW.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    unlisted = sorted(set(run.stdout.split()) - set(listed))
    assert not unlisted, f"say what autocast does with {', '.join(unlisted)} of jax {jax.__version__}"


# Layout


def on_two_devices(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])


AUTO, EXPLICIT = on_two_devices(AxisType.Auto), on_two_devices(AxisType.Explicit)
ROWS = NamedSharding(AUTO, P("data"))


def barrier(x: Array) -> Array:
    return lax.optimization_barrier(x)


def in_memory_space(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


PLACED: dict[str, Callable[[Array], Array]] = {
    "with_sharding_constraint": lambda x: lax.with_sharding_constraint(x, ROWS),
    "checkpoint_name": lambda x: checkpoint_name(x, "hidden"),
    "device_put": lambda x: jax.device_put(x, ROWS),
    "memory space": in_memory_space,
    "optimization_barrier": barrier,
}


def saved(fn: Callable[..., Array], *args: Array) -> dict[tuple[str, tuple[int, ...]], int]:
    """Returns how many arrays of each dtype and shape are saved for the gradient."""

    def pullback(*args: Array) -> Any:
        return jax.vjp(fn, *args)[1]

    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for leaf in jax.tree.leaves(jax.eval_shape(pullback, *args)):
        key = (leaf.dtype.name, leaf.shape)
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("name", PLACED)
def test_layout_costs_no_memory(name: str) -> None:
    def loss(place: Callable[[Array], Array]) -> Callable[..., Array]:
        def fn(w: Array, x: Array) -> Array:
            for _ in range(3):
                x = place(jax.nn.gelu(place(x @ place(w) + 1.0)))
            return jnp.sum(place(x).astype(jnp.float32))

        return autocast(fn)

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    kept = saved(loss(PLACED[name]), *args)
    assert kept == saved(loss(lambda x: x), *args)
    assert kept["float16", (16, 8)] >= 6


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_policy_saves_the_half_value_by_its_name(half: str) -> None:
    def layer(x: Array, w: Array) -> Array:
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ w), "hidden") @ w)

    by_name = jax.checkpoint_policies.save_only_these_names("hidden")
    remat = jax.checkpoint(layer, policy=by_name)
    x, w = jnp.ones((16, 8)), jnp.ones((8, 8))
    assert saved(autocast(remat, half), x, w)[half, (16, 8)] == 1
    assert (half, (16, 8)) not in saved(autocast(jax.checkpoint(layer), half), x, w)


def test_operands_of_all_kinds_are_placed_together() -> None:
    def fn(x: Array) -> Any:
        tree = {"half": x @ x, "full": x, "int": jnp.arange(2), "key": jax.random.key(0), "z": lax.complex(x, x)}
        return lax.optimization_barrier(jax.device_put(tree, jax.devices()[0]))

    dtypes = {name: x.dtype.name for name, x in autocast(fn)(jnp.ones((2, 2))).items()}
    assert dtypes == {"half": "float16", "full": "float32", "int": "int32", "key": "key<fry>", "z": "complex64"}


# Primitives that are not entered get what they were traced for; each is here after a product in half.


def product(x: Array) -> Array:
    return x @ x / 8


def with_references(x: Array) -> Array:
    ref = jax.new_ref(product(x))

    @jax.jit
    def add(ref: Any, y: Array) -> None:
        ref[...] = ref[...] + y

    def step(carry: Array, _: None) -> tuple[Array, None]:
        ref[0] = ref[0] + carry[1]
        return jnp.tanh(carry @ x), None

    add(ref, product(x))
    carry, _ = lax.scan(step, product(x), None, length=2)
    lax.cond(carry[0, 0] > -2, lambda: add(ref, carry), lambda: None)
    return jax.freeze(ref)


def with_pallas(x: Array) -> Array:
    def kernel(a: Any, out: Any) -> None:
        out[...] = a[...] * 2

    call = pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return call(product(x))


def with_callbacks(x: Array) -> Array:
    def host(a: Array) -> np.ndarray:
        assert a.dtype == np.float32
        return np.asarray(a) * 2

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    jax.debug.callback(lambda a: None, product(x))
    ordered = io_callback(host, out, product(x), ordered=True)
    return jax.pure_callback(host, out, product(x)) + ordered


def with_solvers(x: Array) -> Array:
    y = product(x)
    solution = lax.custom_linear_solve(lambda v: 2.0 * v, y, lambda _, b: b / 2, lambda _, b: b / 2)

    def improve(f: Callable[[Array], Array], guess: Array) -> Array:
        return lax.fori_loop(0, 3, lambda _, v: v - f(v), guess)

    def tangent(g: Callable[[Array], Array], y: Array) -> Array:
        return y / g(jnp.ones_like(y))

    return solution + lax.custom_root(lambda v: v - jnp.cos(y) * 0.1, y, improve, tangent)


def with_collectives(x: Array) -> Array:
    def local(rows: Array) -> Array:
        y = product(rows.T @ rows)
        moved = lax.ppermute(y, "data", [(0, 1), (1, 0)]) + lax.all_to_all(y, "data", 0, 0, tiled=True)
        shares = jnp.tile(lax.psum_scatter(y, "data", tiled=True), (2, 1))
        return lax.psum(y, "data") + lax.all_gather(y, "data").sum(0) + moved + shares

    return jax.shard_map(local, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))(x)


def with_axes_of_vmap(x: Array) -> Array:
    def row(r: Array) -> Array:
        return lax.psum(jnp.tanh(r @ x), "rows") + lax.pmean(r, "rows") - lax.pmax(lax.stop_gradient(r), "rows")

    return jax.vmap(row, axis_name="rows")(x)


def with_batching_rule(x: Array) -> Array:
    @jax.custom_batching.custom_vmap
    def f(y: Array) -> Array:
        return jnp.sin(y)

    f.def_vmap(lambda size, batched, y: (jnp.sin(y), True))
    return jax.vmap(f)(product(x))


def with_sorting(x: Array) -> Array:
    y = product(x)
    a, b = lax.sort((y, x), num_keys=1)
    best = lax.top_k(y, 2)[0] + lax.approx_max_k(y, 2)[0]
    return a + b + jnp.pad(best, ((0, 0), (0, 6))) + lax.cummax(y) + lax.cumlogsumexp(y)


def with_pieces(x: Array) -> Array:
    a, b = jnp.split(product(x), 2)
    rows = sum(jnp.unstack(product(x)))
    shifted = lax.dynamic_update_slice(product(x), lax.dynamic_slice(x, (1, 1), (2, 2)), (0, 0))
    top = product(x).at[jnp.array([0, 1])].max(x[:2]).at[0].min(0.5).at[1].multiply(2.0)
    return jnp.concatenate([a * b, b]) + rows + shifted + top.at[2].set(1.0)


def with_other_floats(x: Array) -> Array:
    y = product(x)
    real = jnp.real(jnp.fft.ifft(jnp.fft.fft(y) * (1 + 0.5j))) + jnp.abs(lax.complex(y, x))
    bits = lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32), jnp.float32)
    return real + bits + lax.reduce_precision(y, 8, 7)


def with_derivatives(x: Array) -> Array:
    value, tangent = jax.jvp(lambda y: jnp.tanh(product(y)), (x,), (x,))
    linear = jax.linearize(lambda y: jnp.sin(product(y)), x)[1](x)
    hessian = jax.jacfwd(jax.grad(lambda v: jnp.sum(jnp.tanh(v @ x) @ x)))(x[0])
    return value + tangent + linear + hessian / 8


def with_exported(x: Array) -> Array:
    exported = jax.export.export(jax.jit(lambda y: jnp.sin(y) * 2))
    return exported(jax.ShapeDtypeStruct(x.shape, x.dtype)).call(product(x))


def with_special_functions(x: Array) -> Array:
    y = jnp.abs(product(x)) + 1
    special = jax.scipy.special
    return special.gammaln(y) + special.zeta(y + 1, y) + special.gammainc(y, y) + special.i0e(y)


HELD: dict[str, Callable[[Array], Array]] = {
    "references": with_references,
    "pallas": with_pallas,
    "callbacks": with_callbacks,
    "solvers": with_solvers,
    "collectives": with_collectives,
    "axes of vmap": with_axes_of_vmap,
    "batching rule": with_batching_rule,
    "sorting": with_sorting,
    "pieces": with_pieces,
    "other floats": with_other_floats,
    "derivatives": with_derivatives,
    "exported": with_exported,
    "special functions": with_special_functions,
    "composite": lambda x: lax.composite(lambda y: jnp.sin(y) * y, "my.op")(product(x)),
    "ragged": lambda x: lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([3, 5])),
    "platforms": lambda x: lax.platform_dependent(product(x), cpu=jnp.sin, default=jnp.cos),
}  # fmt: skip
NO_GRADIENT = ("pallas", "callbacks", "composite")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.filterwarnings("ignore:the gradient taken at")  # of `with_derivatives`, whose elements are not small
def test_nothing_is_wrong_behind_a_product_in_half(name: str) -> None:
    fn = HELD[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)

    def total(fn: Callable[[Array], Array]) -> Callable[[Array], Any]:
        def run(x: Array) -> tuple[Array, Array]:
            y = fn(x).astype(jnp.float32)
            return jnp.sum(y), y

        return run if name in NO_GRADIENT else jax.grad(run, has_aux=True)

    wanted, found = jax.jit(lambda x: (total(fn)(x), total(autocast(fn))(x)))(x)
    for plain, ours in zip(wanted, found, strict=True):
        size = float(jnp.max(jnp.abs(plain)))
        np.testing.assert_allclose(ours, plain, rtol=0, atol=8e-3 * size)


def test_explicit_shardings() -> None:
    def fn(x: Array) -> Array:
        rows, whole = (jax.sharding.reshard(x, P("data", None)), jax.sharding.reshard(x, P(None, None)))
        y = jnp.einsum("ij,jk->ik", rows, whole, out_sharding=P("data", None))
        z = jnp.einsum("ij,ik->jk", y, y, out_sharding=P(None, None))
        return jnp.tanh(z / 8)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 4, jnp.float32)
    with jax.set_mesh(EXPLICIT):
        result = jax.jit(autocast(fn))(x)
        np.testing.assert_allclose(result, jax.jit(fn)(x), atol=4e-3)
    assert result.dtype == jnp.float16
