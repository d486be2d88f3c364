"""The contract of all recipes: products and gradients are those of a NumPy reference of each definition."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_reference import DEFINITIONS, E5M2, Definition, ragged_products
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.policies.autocasting import RECIPES
from jmp_train.policies.autocasting.fp8 import Extra, product_in_few_bits
from jmp_train.policies.autocasting.fp8.casting import quantize
from jmp_train.policies.autocasting.fp8.products import STORED

pytestmark = pytest.mark.quick

NEAREST = jt.policies.NVFP4BlockScaling(disable_stochastic_rounding=True)
CASES: dict[str, tuple[Any, Definition]] = {
    name: (NEAREST if name == "NVFP4BlockScaling" else recipe(), DEFINITIONS[name]) for name, recipe in RECIPES.items()
}
FURTHER: dict[str, tuple[Any, Definition]] = {
    "float32 blocks": (jt.policies.Float8BlockScaling(power_of_two=False), Definition("float32", terms=128, rows=128)),
    "e5m2 gradients": (jt.policies.MXFP8BlockScaling("HYBRID"), Definition("e8m0", backward=E5M2, terms=32)),
    "no transform": (
        dataclasses.replace(NEAREST, disable_rht=True, disable_2d_quantization=True),
        dataclasses.replace(DEFINITIONS["NVFP4BlockScaling"], hadamard=False, rows=1),
    ),
}
ALL = CASES | FURTHER
PLAIN = (((1,), (0,)), ((), ()))


def normal(seed: int, *shape: int) -> Any:
    """Returns numbers whose rows differ in magnitude."""
    random = np.random.default_rng(seed)
    rows = np.exp2(random.normal(size=(*shape[:-1], 1)) * 3)
    return (random.normal(size=shape) * rows).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def both_ways(
    recipe: Any, numbers: Any, x: Any, w: Any, g: Any, groups: Any = None, weights: Any = (False, True)
) -> Any:
    extra = Extra(groups=groups)
    run = lambda x, w: product_in_few_bits(x, w, numbers, recipe, jnp.float32, extra, weights)
    out, pullback = jax.vjp(run, x, w)
    return out, *pullback(g)


def assert_near(found: Any, wanted: Any) -> None:
    for got, exact in zip(found, wanted, strict=True):
        finite = exact[np.isfinite(exact)]
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6 * np.abs(finite).max(initial=0))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (48, 160, 130), (130, 257, 129)])
def test_products_and_gradients_are_those_of_the_definition(name: str, sizes: Any) -> None:
    recipe, definition = ALL[name]
    m, k, n = sizes
    x, w, g = normal(0, m, k), normal(1, n, k).T, normal(2, m, n)
    assert_near(both_ways(recipe, PLAIN, x, w, g), definition.products(x, w, g))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ALL)
def test_products_of_one_term_are_equal_bit_for_bit(name: str) -> None:
    """The order of a sum is then fixed: of the product, of the gradient of x, or of that of w."""
    recipe, definition = ALL[name]
    for which, (m, k, n) in enumerate(((7, 1, 9), (7, 9, 1), (1, 9, 7))):
        if which == 2 and definition.hadamard:
            continue  # it has sixteen terms
        x, w, g = normal(0, m, k), normal(1, k, n), normal(2, m, n)
        found, wanted = both_ways(recipe, PLAIN, x, w, g), definition.products(x, w, g)
        np.testing.assert_array_equal(found[which], wanted[which])


def alike(array: Any) -> Any:
    """Returns matrices with one largest magnitude, so that scales of whole tensors are those of each matrix."""
    array[:, 0, 0] = 2 * np.abs(array).max()
    return array


WITHOUT_TRANSFORM = [name for name in ALL if name != "NVFP4BlockScaling"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", WITHOUT_TRANSFORM)
def test_batches_are_products_of_their_own(name: str) -> None:
    """Those of an einsum that has the batch and the contracted dimensions in other places."""
    recipe, definition = ALL[name]
    x, w, g = (alike(normal(i, 3, *shape)) for i, shape in enumerate(((20, 40), (40, 33), (20, 33))))
    numbers = (((0,), (2,)), ((2,), (0,)))
    found = both_ways(recipe, numbers, x.transpose(2, 1, 0), w.transpose(0, 2, 1), g)
    wanted = [np.stack(part) for part in zip(*map(definition.products, x, w, g), strict=True)]
    assert_near((found[0], found[1].transpose(2, 1, 0), found[2].transpose(0, 2, 1)), wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", WITHOUT_TRANSFORM)
def test_groups_of_rows_are_products_of_their_own(name: str) -> None:
    recipe, definition = ALL[name]
    sizes = np.array([7, 0, 40, 13], np.int32)  # of 64 rows
    x, w, g = normal(0, 64, 40), alike(normal(1, 4, 40, 33)), normal(2, 64, 33)
    found = both_ways(recipe, (((1,), (1,)), ((), ())), x, w, g, sizes)
    assert_near(found, ragged_products(definition, x, w, g, sizes))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_zeros_nothing_and_what_is_not_finite(name: str) -> None:
    recipe, _ = CASES[name]
    x, w, g = normal(0, 6, 20), normal(1, 20, 4), normal(2, 6, 4)
    out, of_x, of_w = both_ways(recipe, PLAIN, 0 * x, w, g)
    assert not np.any(out)
    assert not np.any(of_w)
    assert np.isfinite(of_x).all()
    assert not np.any(both_ways(recipe, PLAIN, x, w, 0 * g)[1])
    for bad in (np.inf, -np.inf, np.nan):
        operands = [a.copy() for a in (x, w, g)]
        results = []
        for a in operands:
            kept, a[1, 1] = a[1, 1], bad
            results.append([bool(np.isfinite(b).all()) for b in both_ways(recipe, PLAIN, *operands)])
            a[1, 1] = kept
        assert results == [[False, True, False], [False, False, True], [True, False, False]]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(0, 5, 3), (5, 0, 3), (5, 3, 0)])
def test_empty_operands(name: str, sizes: Any) -> None:
    m, k, n = sizes
    shapes = [(m, n), (m, k), (k, n)]
    found = both_ways(CASES[name][0], PLAIN, jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n)))
    assert [a.shape for a in found] == shapes
    assert not any(np.any(a) for a in found)


SHARDED = {  # x, w and the cotangent
    "data": ((("data", "model"),), (), (("data", "model"),)),
    "columns": ((), (None, ("data", "model")), (None, ("data", "model"))),
    "rows": ((None, ("data", "model")), (("data", "model"),), ()),
    "both": (("data",), (None, "model"), ("data", "model")),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("parts", ["data", "columns", "rows", "both"])
def test_eight_devices_are_one(name: str, parts: str) -> None:
    """Each operand's largest number is on one device; scales of whole tensors are those of all."""
    recipe = ALL[name][0]
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    arrays = normal(0, 64, 96), normal(1, 96, 32), normal(2, 64, 32)
    specs = (PartitionSpec(*axes) for axes in SHARDED[parts])
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    assert_near(both_ways(recipe, PLAIN, *placed), map(np.asarray, both_ways(recipe, PLAIN, *arrays)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_batch_under_shard_map_with_the_same_weight(name: str) -> None:
    recipe, mesh = CASES[name][0], Mesh(np.array(jax.devices()), ("data",))
    x, w = normal(0, 64, 96), normal(1, 96, 32)
    part = lambda x, w: product_in_few_bits(x, w, PLAIN, recipe)
    specs = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=specs[0])
    gradients = [jax.jit(jax.grad(lambda w, run=run: run(x, w).sum()))(w) for run in (mapped, jnp.matmul)]
    assert float(jnp.linalg.norm(gradients[0] - gradients[1]) / jnp.linalg.norm(gradients[1])) < 0.3


@pytest.mark.full
def test_stochastic_rounding_has_no_bias() -> None:
    """Over a million draws of each of several numbers, by a z-test; the numbers of a type stay."""
    count = 1_000_000

    @functools.partial(jax.jit, static_argnums=1)
    def drawn(number: Any, dtype: Any) -> Any:
        x = jnp.full(count, number, jnp.float32)
        found = quantize(x, dtype, key=jax.random.key(1)).astype(jnp.float32)
        return found.min(), found.max(), jnp.mean(found - x)

    for dtype, numbers in ((jnp.float4_e2m1fn, (0.1, -0.7, 1.3, 2.25, -5.5, 3.0)), (jnp.float8_e5m2, (1.1, -3e-7))):
        for number in np.array(numbers, np.float32):
            low, high, error = drawn(number, dtype)
            assert low <= number <= high
            share = (number - low) / max(high - low, 1e-30)
            assert abs(error) <= 4 * (high - low) * (share * (1 - share) / count) ** 0.5


@pytest.mark.full
def test_gradients_are_rounded_by_the_key() -> None:
    recipe = jt.policies.NVFP4BlockScaling()
    x, w, g = np.random.default_rng(0).normal(size=(3, 32, 32)).astype(np.float32)

    @jax.jit
    def of_x(key: Any) -> Any:
        run = lambda x: product_in_few_bits(x, w, PLAIN, recipe, extra=Extra(key=key))
        return jax.vjp(run, x)[1](g)[0]

    keys = jax.random.split(jax.random.key(0), 400)
    many = jax.vmap(of_x)(keys)
    np.testing.assert_array_equal(many[3], of_x(keys[3]))
    assert (many[0] != many[1]).mean() > 0.5
    nearest = both_ways(dataclasses.replace(recipe, disable_stochastic_rounding=True), PLAIN, x, w, g)[1]
    q = DEFINITIONS["NVFP4BlockScaling"].quantized(w, weight=True)
    exact = g @ (q.numbers * q.inverse).T
    assert jnp.linalg.norm(many.mean(0) - exact) < 0.2 * jnp.linalg.norm(nearest - exact)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_what_gradients_need_is_stored_once_in_few_bits_and_has_a_name(name: str) -> None:
    recipe = CASES[name][0]
    x, w = jnp.asarray(normal(0, 64, 128)), jnp.asarray(normal(1, 128, 32))
    layer = lambda x, w: product_in_few_bits(jnp.sin(x), w, PLAIN, recipe)

    def stored(run: Any) -> dict[str, int]:
        leaves = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(run, x, w)[1], x, w))
        large = [a for a in leaves if a.size >= w.size]
        return {str(a.dtype): sum(b.size for b in large if b.dtype == a.dtype) for a in large}

    policies = jax.checkpoint_policies
    both = {recipe.forward_dtype.name: x.size + w.size}
    assert stored(layer) == both | {"float32": x.size}  # the derivative of the sine
    assert stored(jax.checkpoint(layer, policy=policies.save_only_these_names(STORED))).items() >= both.items()
    assert recipe.forward_dtype.name not in stored(jax.checkpoint(layer))


@pytest.mark.parametrize("name", ["Float8BlockScaling", "MXFP8BlockScaling"])
def test_cpus_get_no_product_of_bfloat16_with_float32_results(name: str) -> None:
    """XLA leaves some of them to code that does not have them, where it finds transposed operands."""
    x, w, g = normal(0, 4, 8, 16), normal(1, 16, 8), normal(2, 4, 8, 8)
    program = both_ways.lower(CASES[name][0], (((2,), (0,)), ((), ())), x, w, g).as_text()
    dots = re.findall(r"dot_general .*: \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\) -> tensor<\w+x(\w+)>", program)
    assert dots == [("f32",) * 3] * 3


STEP = """
import dataclasses, jax, jax.numpy as jnp, optax, jmp_train as jt
from jmp_train.policies.autocasting import RECIPES

def loss_fn(params, x):
    with jax.named_scope("mlp"):
        x = x + (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]
    return (x.astype(jnp.float32) ** 2).mean()

wide = jnp.ones((32, 96))
params, rules = {"gate": wide, "up": wide, "down": wide.T}, jt.TORCH_CUDA.replace(paths={"mlp": "fp8"})
for recipe in (*(recipe() for recipe in RECIPES.values()), jt.policies.NVFP4BlockScaling(disable_rht=True)):
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=recipe)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    state, x = jt.TrainState.create(params, optimizer), jnp.ones((4, 16, 32))
    if isinstance(recipe, jt.DelayedScaling):
        state = jt.steps.with_fp8_state(step, state, x)
    assert jnp.isfinite(jax.jit(step)(state, x)[1]["loss"]), recipe
"""


@pytest.mark.full
def test_a_step_of_every_recipe_runs_as_users_compile_it() -> None:
    environment = os.environ | {"XLA_FLAGS": ""}  # the other tests compile plainer code
    run = subprocess.run(
        [sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr


MANY = 140_001  # terms of 127 * 127 are more than int32 holds


@jax.jit
def sums_of_many(one: Any) -> Any:
    """Returns products in int8 of many ones and halves, and their sums."""
    int8 = functools.partial(product_in_few_bits, recipe=jt.policies.Int8RowwiseScaling())
    ragged = functools.partial(int8, numbers=(((1,), (1,)), ((), ())))
    ones, halves, two = (
        jnp.broadcast_to(x, shape) for x, shape in ((one, (MANY, 1)), (one / 2, (3, MANY)), (one, (2, 70_000, 1, 2)))
    )
    sizes = jnp.array([MANY - 9, 0, 8], jnp.int32)
    of_groups = jax.grad(lambda w: ragged(ones, w, extra=Extra(groups=sizes)).sum())(jnp.ones((3, 1, 1)))
    return {
        "terms": (int8(halves, ones, PLAIN), MANY / 2),
        "batches": (int8(two, two[:, :, 0], (((1, 3), (1, 2)), ((0,), (0,)))), 140_000),
        "rows": (ragged(halves, ones[None], extra=Extra(groups=jnp.array([3], jnp.int32))), MANY / 2),
        "groups": (of_groups[:, 0, 0], sizes),
    }


def test_sums_of_many_terms_do_not_wrap_around() -> None:
    for name, (found, wanted) in sums_of_many(np.float32(1)).items():
        np.testing.assert_allclose(found, np.broadcast_to(wanted, found.shape), rtol=1e-5, err_msg=name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_rows_of_no_group_do_not_count(name: str) -> None:
    """Neither NaN there nor large numbers change a result, or a scale."""
    sizes = jnp.array([7, 0, 4], jnp.int32)  # of 16 rows
    x, w, g = normal(0, 16, 40), normal(1, 3, 40, 33), normal(2, 16, 33)
    run = functools.partial(both_ways, CASES[name][0], (((1,), (1,)), ((), ())))
    wanted = run(x, w, g, sizes)
    for bad in (1e6, np.inf, np.nan):
        x[11:], g[11:] = bad, bad
        jax.tree.map(np.testing.assert_array_equal, run(x, w, g, sizes), wanted)
    assert not np.any(wanted[0][11:])
    assert not np.any(wanted[1][11:])


def key_of(number: int) -> Any:
    return Extra(key=jax.random.key(0), number=jnp.uint32(number))


@pytest.mark.full
def test_products_draw_bits_of_their_own() -> None:
    """Of the same operands and cotangent: by number, by operand of a square product, and the same ones again."""
    x, w, g = (jnp.asarray(normal(i, 32, 32)) for i in range(3))
    recipe = jt.policies.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)

    @jax.jit
    def gradients(number: Any) -> Any:
        run = lambda x, w: product_in_few_bits(x, w, PLAIN, recipe, extra=key_of(0)._replace(number=number))
        return jax.vjp(run, x, w)[1](g)

    first, again, other = (gradients(jnp.uint32(number)) for number in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert all((a != b).mean() > 0.5 for a, b in zip(first, other, strict=True))
    one = jnp.eye(32)  # the gradients are the cotangent in few bits
    symmetric = lambda x, w: product_in_few_bits(x, w, PLAIN, recipe, extra=key_of(0), weights=(False, False))
    left, right = jax.vjp(symmetric, one, one)[1](g + g.T)
    assert (left != right).mean() > 0.1
