"""`tune` for products in 8 and 4 bits: which it names, by which rules, and that its trials are autocast itself."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train as jt
from jmp_train.policies import (
    DelayedScaling,
    Float8CurrentScaling,
    Int8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jmp_train.policies.autocasting import RECIPES
from jmp_train.policies.autocasting.emulating import COMPILER_OPTIONS
from jmp_train.tools.tuning.precisions import ProductsInFewBits, precision_of
from jmp_train.tools.tuning.tolerance import Errors, Tolerance, curve_error
from jmp_train.tools.tuning.tuned_functions import Subject
from jmp_train.tools.tuning.tuned_rules import TunedProduct, Verification
from jmp_train.tools.tuning.units import Unit, flags_from, fp8_entries, index_of
from jmp_train.tools.tuning.verifying import Training

pytestmark = pytest.mark.quick

KEY = jax.random.key(0)


def normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(KEY, number), shape)


def loss_fn(params: Any, batch: Any) -> Any:
    """Layers of which one reads an outlier, which takes the digits of all other numbers in its row."""
    x, y = batch
    with jax.named_scope("body"):
        with jax.named_scope("up"):
            h = jnp.tanh(x @ params["up"])
        with jax.named_scope("mid"):
            h = h + jnp.tanh(h @ params["mid"])
    with jax.named_scope("outlier"):
        h = h.at[:, 0].multiply(3000.0) @ params["bad"]
    with jax.named_scope("head"):
        return ((h @ params["head"] - y) ** 2).mean()


def params_of() -> Any:
    bad = (normal(2, 32, 32) / 6).at[0].multiply(1e-4)
    return {"up": normal(0, 16, 32) / 4, "mid": normal(1, 32, 32) / 6, "bad": bad, "head": normal(3, 32, 4) / 6}


def batches(count: int) -> list[Any]:
    inputs = [normal(10 + i, 64, 16) for i in range(count)]
    return [(x, jnp.sin(x[:, :4])) for x in inputs]


def step_of(policy: Any, fn: Any = loss_fn) -> tuple[Any, jt.TrainState]:
    optimizer = jt.with_loss_scale(optax.sgd(1e-3), jt.NoOpLossScale())
    return jt.train_step(jt.stateless(fn), optimizer, policy=policy), jt.TrainState.create(params_of(), optimizer)


def products_of(tuned: jt.tuning.TunedRules, *, in_few_bits: bool) -> set[str]:
    return {product.path for product in tuned.products if product.in_few_bits == in_few_bits}


def test_an_outlier_keeps_its_product_out_of_int8(tmp_path: Path) -> None:
    params = params_of()
    tuned = jt.tune(loss_fn, [(params, batch) for batch in batches(2)], dtype="int8")
    assert products_of(tuned, in_few_bits=False) == {"outlier"}
    assert products_of(tuned, in_few_bits=True) == {"body/up", "body/mid", "head"}
    costs = {product.path: product.alone.loss for product in tuned.products if product.alone is not None}
    assert costs.pop("outlier") > 10 * max(costs.values())
    assert (tuned.dtype, tuned.recipe, tuned.complete, tuned.choices) == ("int8", Int8RowwiseScaling(), True, 4)
    assert tuned.verification.passed
    assert tuned.rules == jt.TORCH_CUDA.replace(paths={"^body(/|$)": "fp8", "^head(/|$)": "fp8"})
    report = jt.explain_autocast(jt.autocast(loss_fn, "bfloat16", rules=tuned.rules), params, batches(1)[0])
    few = sum(row.flops for row in report.operations if row.rule == "fp8")
    assert tuned.few_bits_flops == pytest.approx(few / sum(row.flops for row in report.operations))
    tuned.rules.save(tmp_path / "rules.toml")
    assert jt.AutocastRules.load(tmp_path / "rules.toml") == tuned.rules
    assert "half      dot_general  outlier" in str(tuned)
    assert tuned.code().startswith('rules = jt.TORCH_CUDA.replace(\n    paths={"^body(/|$)": "fp8"')
    for table in (jt.TORCH_CUDA, jt.TORCH_CPU, jt.TORCH_CUDA.replace(paths={"head": "float32"}), jt.AutocastRules()):
        rules, found = table.replace(primitives={"dot_general": "fp8"}, operations={"^a": "fp8"}), {"jt": jt}
        exec(dataclasses.replace(tuned, rules=rules).code(), found)  # noqa: S102 (code to copy)
        assert found["rules"] == rules


def test_wrong_arguments_are_named() -> None:
    examples = [(params_of(), batches(1)[0])]
    wrong: tuple[tuple[dict[str, Any], Any, str], ...] = (
        (
            {"dtype": "int8", "recipe": Float8CurrentScaling()},
            ValueError,
            "needs dtype='float8_e4m3fn', got dtype='int8'",
        ),
        ({"recipe": MXFP8BlockScaling()}, ValueError, "needs dtype='float8_e4m3fn', got dtype='float16'"),
        ({"dtype": "float8_e4m3fn", "recipe": DelayedScaling()}, ValueError, "recipe=DelayedScaling.* has a state"),
        ({"dtype": "int8", "recipe": "Int8RowwiseScaling"}, TypeError, "recipe must be a recipe"),
        ({"dtype": "float8_e5m2"}, ValueError, "must be float8_e4m3fn, float4_e2m1fn, int8, float16 or bfloat16"),
        ({"dtype": "float8_e4m3fn", "steps": 2}, ValueError, "steps=2 needs a TrainStep"),
    )
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            jt.tune(loss_fn, examples, **options)
    with pytest.raises(ValueError, match="no operation of fn could be int8"):
        jt.tune(lambda w, x: (w * x).sum(), [(jnp.ones(3), jnp.ones(3))], dtype="int8")


def test_the_recipe_of_the_step_is_tuned_unless_it_has_a_state_or_another_dtype() -> None:
    policy = jt.get_policy("autocast_bfloat16")
    cases = (
        (MXFP8BlockScaling(), "float8_e4m3fn", MXFP8BlockScaling()),
        (MXFP8BlockScaling(), "int8", Int8RowwiseScaling()),
        (DelayedScaling(), "float8_e4m3fn", Float8CurrentScaling()),
    )
    for own, dtype, wanted in cases:
        found = precision_of(step_of(dataclasses.replace(policy, fp8=own))[0], dtype, None)
        assert found == ProductsInFewBits(jnp.dtype(jnp.bfloat16), jt.TORCH_CUDA, wanted)


def test_a_product_that_was_not_tried_says_why() -> None:
    product = TunedProduct("dot_general", "attention", "model.py:3", 0.5, False, None, not_tried="shares its line")
    assert str(product) == "not tried  dot_general  attention  model.py:3  (shares its line)  50.0% of the flops"


def test_entries_of_paths() -> None:
    paths = ["a/b", "a/c", "a/c/d", "ab", "", "e"]
    units = [Unit((f"{path}:dot_general@/my/file.py:{i}",), 1, 1, 1) for i, path in enumerate(paths)]
    units.append(Unit(("e:dot_general@/my/file.py:9",), 1, 1, 1, is_free=False))
    assert fp8_entries({0, 1, 2, 3}, units) == (["^a(/|$)", "^ab(/|$)"], [])
    assert fp8_entries({0, 2}, units) == (["^a/b(/|$)", "^a/c/d(/|$)"], [])
    assert fp8_entries({1, 4, 5}, units) == (
        [], [r"^a/c:dot_general@", r"^:dot_general@.*my/file\.py:4$", r"^e:dot_general@.*my/file\.py:5$"]
    )  # fmt: skip


def test_a_curve_may_be_below_but_not_above() -> None:
    exact = np.linspace(2.0, 0.0, 100)
    assert curve_error(list(exact), list(exact)) == 0.0
    assert curve_error(list(exact - 0.5), list(exact)) == 0.0
    bump = np.where(np.arange(100) < 10, 0.2, 0.0)
    assert curve_error(list(exact + bump), list(exact)) == pytest.approx(0.2, rel=1e-5)
    late = np.where(np.arange(100) < 50, exact, np.nan)
    assert curve_error(list(late), list(exact)) == np.inf
    assert curve_error([np.nan], [1.0]) == curve_error([np.inf, 1.0], [1.0, 1.0]) == np.inf


def test_training_that_diverges_is_not_verified() -> None:
    """Also if half precision diverges too, or a function of the user's own is the tolerance."""
    step, state = step_of(None)
    precision, batch = precision_of(step, "int8", None), batches(1)[0]
    examples = [(state, batch), (state, jax.tree.map(lambda x: x * jnp.nan, batch))]
    verification = Verification(True, Errors(True, 0.0, 0.0, 0.0, 1.0), 0)
    for bound in (0.01, np.inf):
        losses = {1.0: ((1.0, 1.0), (1.0, np.nan))}
        training = Training(step, examples, precision, Tolerance(loss=bound), 2, losses)
        assert not training.judged(verification, precision.base, 1.0).passed


def attention(params: Any, x: Any, *, matmul: Any = jnp.matmul) -> Any:
    with jax.named_scope("attention"):
        keys = matmul(x @ params["in"], params["keys"])
        h = matmul(jax.nn.softmax(matmul(keys, keys.mT)), keys)
        with jax.named_scope("out"):
            return (h @ params["out"]).sum()


@pytest.mark.parametrize("named", [False, True])
def test_products_of_attention_run_in_few_bits_only_if_named(named: bool) -> None:
    """Whatever is chosen: by paths, which leave them alone, or by operations, which do not."""
    own = jt.TORCH_CUDA.replace(operations={"^attention:dot_general@": "fp8"} if named else {})
    step, _ = step_of(dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=own))
    precision = precision_of(step, "int8", None)
    example = {name: jnp.ones((8, 8)) for name in ("in", "keys", "out")}, jnp.ones((2, 4, 8))
    shared = functools.partial(attention, matmul=lambda x, y: x @ y)  # a line in common with attention's
    for fn, free in ((attention, 5 if named else 3), (shared, 5 if named else 2)):
        units = precision.units(Subject(fn, "loss"), example)
        assert sum(unit.operations for unit in units if unit.is_free) == free
        assert [unit.path for unit in units if unit.not_tried] == ["attention"] * (fn is shared and not named)
        for kept in ({i for i, unit in enumerate(units) if unit.path == path} for path in ("", "attention/out")):
            report = jt.explain_autocast(precision.run(fn, precision.rules(kept, units)), *example)
            few = sum(row.rule == "fp8" for row in report.operations)
            assert few == sum(unit.operations for i, unit in enumerate(units) if unit.is_free and i not in kept)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "DelayedScaling"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_trials_are_autocast_itself(name: str, half: str) -> None:
    """With every choice of flags, but for the order of sums: values and gradients."""
    policy = dataclasses.replace(jt.get_policy(f"autocast_{half}"), rules=jt.TORCH_CPU)
    step, _ = step_of(policy)
    # The keys of stochastic rounding come from the gradients' bits.
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "NVFP4BlockScaling" else RECIPES[name]()
    precision = precision_of(step, recipe.forward_dtype.name, recipe)
    assert (precision.half, precision.base) == (half, jt.TORCH_CPU)
    params, batch = params_of(), batches(1)[0]
    units = precision.units(Subject(loss_fn, "loss"), (params, batch))

    def trial(flags: Any, params: Any) -> Any:
        run = precision.trial(loss_fn, flags_from(flags, index_of(units)))
        return jax.value_and_grad(lambda p: run(p, batch))(params)

    by_flags = jax.jit(trial, compiler_options=COMPILER_OPTIONS)
    found = []
    for kept in (set(), {0}, {1, 2}, {3}, {0, 1, 2, 3}):
        rules = precision.rules(kept, units)
        gradient = jax.value_and_grad(lambda p, rules=rules: precision.run(loss_fn, rules)(p, batch))
        trials, wanted = by_flags(np.array([i not in kept for i in range(len(units))]), params), gradient(params)
        assert relative(trials, wanted) < 2e-4
        found.append(trials)
    assert all(relative(x, found[-1]) > 3e-3 for x in found[:-1])


def relative(tree: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def test_an_example_that_half_precision_fails_says_nothing_about_products_in_few_bits() -> None:
    """As one in which its rounding alone changes what a router decides; if it counted, no choice would be verified."""

    def routed(w: jax.Array, x: jax.Array) -> jax.Array:
        gate = x[0] @ w["router"]  # 1.001 is 1 in bfloat16
        h = jnp.where(gate > 1, jnp.tanh(x @ w["up"]), x @ w["up"])
        return (h.astype(jnp.float32) ** 2).mean()

    w = {"router": jnp.ones((16, 1)), "up": normal(0, 16, 16)}
    clear, close = (jnp.full((4, 16), x / 16) * jnp.sign(normal(1, 4, 16)).at[0].set(1) for x in (3.0, 1.001))
    tuned = jt.tune(routed, [(w, clear)], held_out=[(w, close)], dtype="int8")
    assert [product.in_few_bits for product in tuned.products] == [True, True]
    assert (tuned.verification.passed, tuned.verification.uncounted) == (True, 1)
    assert "without 1 of the examples, on which half precision alone does not hold" in str(tuned)
    with pytest.raises(ValueError, match="find rules for half precision first"):
        jt.tune(routed, [(w, close)], dtype="int8")
