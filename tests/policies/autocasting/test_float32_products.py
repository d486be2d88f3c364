"""float32 said by a rule is float32 on every device: such products and their gradients have precision=HIGHEST."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.policies.programs import walk

pytestmark = [pytest.mark.quick, pytest.mark.newest]

X = jnp.ones((4, 4))
HIGHEST = (lax.Precision.HIGHEST,) * 2
P = lax.DotAlgorithmPreset
NUMBERS = ("NHWC", "HWIO", "NHWC")


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    image, kernel = x[None, :, :, None], w[:2, :2, None, None]
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)[0, :, :, 0]


def ragged(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3]))


def attended(x: jax.Array, w: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bij,bkj->bik", jnp.stack([x, x]), jnp.stack([w, w])))
    return jnp.einsum("bij,bjk->bik", weights, jnp.stack([w, w])).sum(0)


@jax.custom_vjp
def of_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


of_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_jvp
def of_jvp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


@of_jvp.defjvp
def _tangents(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return of_jvp(x, w), dx @ w + x @ dw


def in_scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 2)[0]


def in_cond(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, product, lambda x, w: w @ x, x, w)


def complexes(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.real(lax.complex(x, w) @ lax.complex(w, x))


KINDS = (
    *(product, convolved, ragged, attended, of_vjp, of_jvp, in_scan, in_cond, complexes),
    *(jax.jit(product), jax.checkpoint(product)),
)
WAYS: dict[str, Callable[[Callable[..., Any], str], Callable[..., Any]]] = {
    "paths": lambda fn, word: jt.autocast(named(fn), rules=jt.TORCH_CUDA.replace(paths={"head": word})),  # pyright: ignore[reportArgumentType]
    "primitives": lambda fn, word: jt.autocast(fn, rules=jt.TORCH_CUDA.replace(primitives=of_products(word))),
    "operations": lambda fn, word: jt.autocast(
        fn,
        rules=jt.TORCH_CUDA.replace(operations={":(dot|conv|ragged).*": word}),  # pyright: ignore[reportArgumentType]
    ),
    "functions": lambda fn, word: jt.autocast(
        called(fn),
        rules=jt.TORCH_CUDA.replace(functions={"head_of_net": word}),  # pyright: ignore[reportArgumentType]
    ),
    "autocast_as": lambda fn, word: jt.autocast(jt.autocast_as(word)(fn)),  # pyright: ignore[reportArgumentType]
}


def of_products(word: str) -> Any:
    return dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot_general"), word)


def named(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.named_scope("head")(fn)


def called(fn: Callable[..., Any]) -> Callable[..., Any]:
    @jax.jit
    def head_of_net(x: jax.Array, w: jax.Array) -> jax.Array:
        return fn(x, w)

    return head_of_net


def gradients(run: Callable[..., Any], *, lowered: bool = False) -> Callable[..., Any]:
    """Returns a function of two arrays, which were float32 or are in half, with both gradients."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = (jnp.sin(y.astype(jnp.float16) if lowered else y) for y in (x, w))
        return (run(x, w).astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))


def precisions(fn: Callable[..., Any], *args: Any) -> list[Any]:
    equations = [place.equation for place in walk(jax.make_jaxpr(fn)(*args))]
    return [e.params["precision"] for e in equations if e.primitive.name.startswith(("dot", "conv_", "ragged"))]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_float32_by_a_rule_is_highest_in_both_passes(way: str) -> None:
    for kind in KINDS:
        for lowered in (False, True):
            found = precisions(gradients(WAYS[way](kind, "float32"), lowered=lowered), X, X)
            assert len(found) >= 3, (kind, found)
            assert set(found) == {HIGHEST}, (kind, lowered, found)


def test_so_are_products_that_the_tables_keep_in_float32() -> None:
    half = jnp.sin(X)
    whole = jnp.arange(2049, 2065).reshape(4, 4)
    cases: list[tuple[Callable[..., Any], tuple[jax.Array, ...]]] = [
        (lambda x, w: jnp.vdot(x, w), (X, half)),
        (lambda x, w: jnp.einsum("bi,bi->b", x, x), (X, half)),
        (lambda w: whole.astype(jnp.float32) @ w, (half,)),
        (lambda w: jnp.einsum("i,j->ij", jnp.arange(4096.0), w), (X[0],)),
        (lambda x: jnp.cov(x), (X,)),
        (jnp.linalg.pinv, (X,)),
    ]
    for fn, args in cases:
        found = precisions(jt.autocast(fn), *args)
        assert found, fn
        assert set(found) == {HIGHEST}, (fn, found)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_the_programs_of_each_device_say_so(platform: str) -> None:
    def all_of_them(x: jax.Array, w: jax.Array) -> Any:
        runs = [gradients(WAYS["paths"](kind, "float32")) for kind in (product, convolved, ragged, of_vjp, in_scan)]
        return [run(x, w) for run in runs]

    text = jax.jit(all_of_them).trace(X, X).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if re.search(r"dot_general |convolution\(|ragged_dot", line)]
    assert len(products) >= 15
    for line in products:
        assert re.search(r"HIGHEST(>, #\w+<precision |, )HIGHEST", line), line


def test_the_equation_and_jaxs_configuration_come_first() -> None:
    run = WAYS["paths"](product, "float32")
    with jax.default_matmul_precision("high"):
        assert precisions(run, X, X) == [(lax.Precision.HIGH,) * 2]
    with jax.default_matmul_precision("default"):
        assert precisions(run, X, X) == [(lax.Precision.DEFAULT,) * 2]
    for asked in (lax.Precision.DEFAULT, lax.Precision.HIGH, P.TF32_TF32_F32):
        run = WAYS["autocast_as"](lambda x, w, asked=asked: jnp.matmul(x, w, precision=asked), "float32")
        assert precisions(run, X, X) in ([(asked,) * 2], [asked])
    for plain in (
        jt.autocast(product, enabled=False),
        jt.autocast(jt.autocast(product, enabled=False)),
        jt.autocast(jt.autocast_as("keep")(product)),
        jt.autocast(product, rules=jt.TORCH_CUDA.replace(paths={"": "keep"})),
        jt.autocast(product),  # half
        WAYS["paths"](product, "tf32"),
        jt.autocast_as("float32")(product),  # outside of regions
        WAYS["functions"](product, "tf32"),
    ):
        assert precisions(gradients(plain), X, X) == [None] * 3


def test_what_multiplies_exactly_by_itself_stays_as_it_is() -> None:
    @jax.custom_vjp
    def exact(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, precision="highest")

    exact.defvjp(lambda x, w: (exact(x, w), w), lambda w, g: (jnp.matmul(g, w.T, precision="highest"), g))
    jitted = jax.jit(lambda x, w: jnp.matmul(x, w, precision="highest"))
    for fn in (exact, jitted):
        rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "float32", "jit": "float32"})
        names = [e.primitive.name for e in jax.make_jaxpr(jt.autocast(fn, rules=rules))(X, X).eqns]
        assert names[-1] == ("jit" if fn is jitted else "custom_vjp_call")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("word", "preset"), [("tf32_x3", "tf32"), ("bf16_x3", "bf16"), ("bf16_x6", "bf16"), ("bf16_x9", "bf16")]
)
def test_words_for_what_devices_do_faster(word: str, preset: str) -> None:
    count = word[-1]
    run: Any = None
    for way, by_rule in WAYS.items():
        run = gradients(by_rule(product, word))
        traced = jax.jit(run).trace(X, X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        found = re.findall(r"lhs_precision_type = (\w+),.*num_primitive_operations = (\d)", text)
        assert found == [(preset, count)] * 3, (way, text)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()  # which has two of them
        here = re.findall(r"num_primitive_operations = (\d)", text) + re.findall(r"HIGHEST, HIGHEST", text)
        assert here == ([count] * 3 if word in ("bf16_x3", "bf16_x6") else ["HIGHEST, HIGHEST"] * 3)
    (_, gradient) = jax.jit(run)(X, X)
    assert all(bool(jnp.isfinite(g).all()) for g in gradient)
    others = precisions(gradients(WAYS["paths"](convolved, word)), X, X)
    assert set(others) == {HIGHEST}  # a convolution has no such algorithm
    (row,) = jt.explain_autocast(WAYS["paths"](product, word), X, X).operations
    assert (row.rule, row.reason, row.dtypes_out) == (word, "path 'head'", ("float32",))


def test_a_report_says_which_one_runs() -> None:
    def rules(run: Callable[..., Any]) -> list[str]:
        return [r.rule for r in jt.explain_autocast(run, X, X).operations if r.operation[:4] in ("dot_", "conv", "exp")]

    assert rules(WAYS["paths"](lambda x, w: jnp.exp(x @ w), "tf32_x3")) == ["tf32_x3", "float32"]
    assert rules(WAYS["paths"](convolved, "tf32_x3")) == ["float32"]
    assert rules(WAYS["paths"](convolved, "tf32")) == ["tf32"]
    with jax.default_matmul_precision("default"):
        assert rules(WAYS["autocast_as"](product, "float32")) == ["tf32"]
    with jax.default_matmul_precision("highest"):
        assert rules(jt.autocast(product)) == ["float32"]
