"""Policies: their strings, their casts leaf by leaf, and functions under them."""

import copy
import dataclasses
import inspect
import itertools
import pickle
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_train as jt

pytestmark = [pytest.mark.newest, pytest.mark.quick]

F8 = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float8_e3m4]
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, *F8]
MIXED = jt.get_policy("mixed_float16")


def fields(policy: jt.Policy) -> list[str]:
    values = (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduce_dtype)
    return [jnp.dtype(value).name for value in values]


# --- strings ----------------------------------------------------------------------------------


def test_a_policy_is_read_back_from_its_string() -> None:
    policies = [jt.Policy(*dtypes) for dtypes in itertools.product(DTYPES, repeat=3)]
    exotic = [getattr(jnp, name) for name in ("float4_e2m1fn", "float6_e2m3fn")]
    policies += [jt.Policy(dtype, dtype, dtype) for dtype in exotic]
    for policy in policies:
        assert jt.get_policy(str(policy)) == policy
    for dtype in DTYPES:
        policy = jt.Policy(jnp.float32, jnp.float16, jnp.float32, reduce_dtype=dtype)
        assert jt.get_policy(str(policy)) == policy
        assert (",r=" in str(policy)) == (dtype is not jnp.float32)
    with pytest.raises(ValueError, match=r"param_dtype=.*longdouble.* must be a floating dtype of jax"):
        jt.Policy(np.longdouble, jnp.float32, jnp.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f16", "float16 float16 float16"),
        ("p=f16", "float16 float16 float16"),
        ("c=f16", "float32 float16 float16"),
        ("o=f16", "float32 float32 float16"),
        ("params=float32,compute=half,output=float32", "float32 float16 float32"),
        ("o=bf16,p=f64", "float64 float64 bfloat16"),
        ("mixed_float16", "float32 float16 float32"),
        ("mixed_bfloat16", "float32 bfloat16 float32"),
        (" bf16\t", "bfloat16 bfloat16 bfloat16"),
        ("float8_e5m2", "float8_e5m2 float8_e5m2 float8_e5m2"),
        ("c=float8_e4m3fn,o=f32", "float32 float8_e4m3fn float32"),
    ],
)
def test_what_a_string_means(text: str, expected: str) -> None:
    assert fields(jt.get_policy(text)) == [*expected.split(), "float32"]


@pytest.mark.parametrize("key", ["r", "reduce"])
def test_the_reduce_dtype_of_a_string(key: str) -> None:
    policy = jt.get_policy(f"c=bf16,{key}=bfloat16")
    assert fields(policy) == ["float32", "bfloat16", "bfloat16", "bfloat16"]
    assert str(policy) == "p=full,c=bf16,o=bf16,r=bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("P=f32", "Unknown key 'P' in 'P=f32' should be 'params', 'compute', 'output', 'reduce' or 'autocast'"),
        ("=f16", "Unknown key '' in '=f16'"),
        ("param_dtype=f16", "Unknown key 'param_dtype' in"),
        ("f", "Unknown dtype 'f' must be full, half, f32, float32, f16,"),
        ("FULL", "Unknown dtype 'FULL' must be full"),
        ("compute_float16", "Unknown dtype 'compute_float16' must be full"),
        ("", "Unknown dtype '' must be full"),
        ("mixed_float32", "Unknown dtype 'mixed_float32' must be full"),
        ("c=int8", "Unknown dtype 'int8' must be full"),
        ("c=", "Unknown dtype '' must be full"),
        ("c=mixed_float16", "Unknown dtype 'mixed_float16' must be full"),
        ("c=f16=x", "'c=f16=x' in 'c=f16=x' must have the form key=dtype"),
        ("c=f16,", "'' in 'c=f16,' must have the form key=dtype"),
        ("c=f16,f32", "'f32' in 'c=f16,f32' must have the form key=dtype"),
        ("p=f32,p=f16", "'p=f32,p=f16' gives param_dtype more than once"),
        ("c=bf16,compute=bf16,o=full", "'c=bf16,compute=bf16,o=full' gives compute_dtype more than"),
        (5_000 * "x", f"Unknown dtype '{37 * 'x'}...{38 * 'x'}' must be full"),
    ],
)
def test_wrong_strings(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jt.get_policy(text)


def test_a_policy_name_is_a_string() -> None:
    for wrong in (None, jnp.float16, MIXED, b"f16"):
        with pytest.raises(TypeError, match="policy_name must be a string, got"):
            jt.get_policy(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="or a policy: mixed_float16, mixed_bfloat16, autocast_"):
        jt.get_policy("mixed")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="pcoruts=, f1632bhalmixed_", max_size=16))
def test_any_string_is_a_policy_or_a_value_error(text: str) -> None:
    try:
        policy = jt.get_policy(text)
    except ValueError as error:
        assert any(words in str(error) for words in ("Unknown", "must have the form", "more than once"))
    else:
        assert jt.get_policy(str(policy)) == policy


# --- values -----------------------------------------------------------------------------------


def test_policies_are_values() -> None:
    by_name = jt.Policy("float32", np.dtype("float16"), np.float32)
    assert by_name == MIXED and hash(by_name) == hash(MIXED)
    assert by_name != jt.get_policy("mixed_bfloat16")
    assert by_name != jt.Policy("float32", "float16", "float32", "float16")
    assert copy.deepcopy(by_name) == pickle.loads(pickle.dumps(by_name)) == MIXED
    assert by_name.param_dtype == jnp.float32 and by_name.default is by_name
    assert by_name.policy_of("any/path") is by_name
    with pytest.raises(AttributeError):
        by_name.param_dtype = jnp.float16  # type: ignore[misc]


def test_with_output_dtype_keeps_the_rest() -> None:
    policy = jt.Policy(jnp.float32, jnp.float16, jnp.float16, jnp.bfloat16)
    assert fields(policy.with_output_dtype(jnp.float32)) == ["float32", "float16", "float32", "bfloat16"]
    with pytest.raises(ValueError, match=r"^output_dtype=.*must be a floating dtype"):
        policy.with_output_dtype(jnp.int32)


def test_a_policy_is_a_static_argument() -> None:
    traces = []

    def cast(policy: jt.Policy, x: jax.Array) -> jax.Array:
        traces.append(1)
        return policy.cast_to_compute(x)

    jitted = jax.jit(cast, static_argnums=0)
    for spelling in (jnp.float16, "float16", np.dtype("float16")):
        assert jitted(jt.Policy("f4", spelling, "f4"), jnp.ones(2)).dtype == jnp.float16
    assert len(traces) == 1


# --- casts, leaf by leaf ----------------------------------------------------------------------

CASTS = {
    "param": (MIXED.cast_to_param, np.float32),
    "compute": (MIXED.cast_to_compute, np.float16),
    "output": (jt.get_policy("o=bf16").cast_to_output, jnp.bfloat16),
    "full": (jt.cast_to_full, np.float32),
    "half": (jt.cast_to_half, np.float16),
}
each_cast = pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)


@each_cast
def test_floating_jax_arrays_are_cast(cast: Any, dtype: Any) -> None:
    for leaf in (jnp.float16, jnp.bfloat16, jnp.float32, *F8):
        x = jnp.asarray([0.5, 1.0, -2.0], leaf)
        result = cast({"x": [x]})["x"][0]
        assert isinstance(result, jax.Array) and result.dtype == dtype, leaf
        np.testing.assert_array_equal(np.asarray(result, np.float32), [0.5, 1.0, -2.0])
        assert (result is x) == (x.dtype == dtype), leaf


@each_cast
def test_floating_numpy_arrays_are_cast_on_the_host(cast: Any, dtype: Any) -> None:
    for leaf in (np.float16, jnp.bfloat16, np.float32, np.float64):
        result = cast(np.asarray([0.5, -2.0], leaf))
        assert type(result) is np.ndarray and result.dtype == dtype, leaf
        np.testing.assert_array_equal(result.astype(np.float32), [0.5, -2.0])


@each_cast
def test_all_else_is_the_same_object(cast: Any, dtype: Any) -> None:
    del dtype
    leaves = [
        *(jnp.arange(2), jnp.ones(2, bool), jnp.ones(2, jnp.int4), jnp.ones(2, jnp.complex64)),
        *(jax.random.key(0), jax.random.PRNGKey(0), jax.ShapeDtypeStruct((2,), jnp.float32)),
        *(np.arange(2), np.ones(2, np.complex128), np.array(["text"]), np.array([1.5], object)),
        *(1.5, 1, True, np.float32(1.5), np.float64(1.5), "text", abs, object()),
    ]
    result = cast({"leaves": leaves, "nothing": None})
    assert result["nothing"] is None
    for before, after in zip(leaves, result["leaves"], strict=True):
        assert before is after


def test_tracers_are_cast() -> None:
    out = jax.eval_shape(MIXED.cast_to_compute, {"w": jnp.ones(2), "n": jnp.arange(2)})
    assert (out["w"].dtype, out["n"].dtype) == (jnp.float16, jnp.int32)
    grad = jax.grad(lambda x: MIXED.cast_to_output(MIXED.cast_to_compute(x)) * 3)(jnp.float32(1))
    assert grad.dtype == jnp.float32 and float(grad) == 3.0


def test_containers_of_the_ecosystem() -> None:
    graph = jraph.GraphsTuple(
        nodes=np.ones((2, 3), np.float32),
        edges=None,
        senders=jnp.array([0]),
        receivers=jnp.array([1]),
        n_node=jnp.array([2]),
        n_edge=jnp.array([1]),
        globals={"g": jnp.ones(1)},
    )
    cast = MIXED.cast_to_compute(graph)
    assert isinstance(cast, jraph.GraphsTuple) and cast.edges is None
    assert cast.nodes.dtype == cast.globals["g"].dtype == np.float16  # type: ignore[union-attr]
    assert cast.senders is graph.senders

    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    half = MIXED.cast_to_compute(linear)
    assert isinstance(half, eqx.nn.Linear) and half.weight.dtype == jnp.float16
    assert (half.in_features, linear.weight.dtype) == (2, jnp.float32)

    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(MIXED.cast_to_compute(state))
    assert len(leaves) == 2 and {x.dtype for x in leaves} == {np.dtype(np.float16)}


# --- apply_policy -----------------------------------------------------------------------------


class Batch(NamedTuple):
    x: Any
    n: Any


def test_arguments_are_cast_and_the_result_too() -> None:
    seen: dict[str, Any] = {}

    def fn(params: Any, batch: Batch, *, bias: Any, name: str, nothing: None = None) -> Any:
        seen.update(w=params["w"].dtype, x=batch.x.dtype, n=batch.n.dtype, bias=bias.dtype)
        seen.update(name=name, nothing=nothing)
        return {"y": params["w"] * batch.x + bias, "n": batch.n, "name": name}

    batch = Batch(jnp.ones(2, jnp.bfloat16), jnp.arange(2))
    out = jt.apply_policy(fn, MIXED)({"w": jnp.ones(2)}, batch, bias=jnp.ones(2), name="layer")
    assert [seen[k] for k in ("w", "x", "bias")] == [jnp.float16] * 3 and seen["n"] == jnp.int32
    assert (seen["name"], seen["nothing"]) == ("layer", None)
    assert (out["y"].dtype, out["n"].dtype, out["name"]) == (jnp.float32, jnp.int32, "layer")


def test_only_keywords_and_no_arguments_at_all() -> None:
    assert jt.apply_policy(lambda *, x: x + x, MIXED)(x=jnp.float32(1.0001)).dtype == jnp.float32
    assert float(jt.apply_policy(lambda *, x: x, MIXED)(x=jnp.float32(1.0001))) == 1.0
    assert jt.apply_policy(lambda: jnp.ones(2, jnp.float16), MIXED)().dtype == jnp.float32


def test_a_name_will_do_and_something_else_is_refused() -> None:
    assert float(jt.apply_policy(lambda x: x, "mixed_float16")(jnp.float32(1.0001))) == 1.0
    with pytest.raises(TypeError, match=r"policy must be a Policy, a PathPolicy or a name such as .*, got 16"):
        jt.apply_policy(lambda x: x, 16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="mixed_float17"):
        jt.apply_policy(lambda x: x, "mixed_float17")


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum((params["w"] * x) ** 2)


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_gradients_have_the_dtype_of_the_parameters(half: Any) -> None:
    w, x = np.array([0.3, -1.7], np.float32), np.array([1.1, 0.9], np.float32)
    fn = jt.apply_policy(loss, jt.Policy(jnp.float32, half, jnp.float32))
    value, grads = jax.jit(jax.value_and_grad(fn))({"w": jnp.asarray(w)}, jnp.asarray(x))
    assert value.dtype == grads["w"].dtype == jnp.float32
    w64, x64 = (a.astype(half).astype(np.float64) for a in (w, x))
    eps = float(jnp.finfo(half).eps)
    np.testing.assert_allclose(value, np.sum((w64 * x64) ** 2), rtol=3 * eps)
    np.testing.assert_allclose(grads["w"], 2 * w64 * x64**2, rtol=4 * eps)
    # It was computed in half: what float32 would give is another number.
    assert float(value) != float(loss({"w": w}, jnp.asarray(x)))


def test_under_jit_and_vmap() -> None:
    fn = jt.apply_policy(lambda w, x: w @ x, MIXED)
    w, xs = jnp.eye(3) * 2, jnp.arange(12.0).reshape(4, 3)
    out = jax.jit(jax.vmap(fn, in_axes=(None, 0)))(w, xs)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 2 * np.arange(12.0).reshape(4, 3))


def test_the_signature_remains() -> None:
    def fn(params: Any, x: Any, mode: str = "sum") -> Any:
        """Says what."""
        return getattr(jnp, mode)(params * x)

    wrapped = jt.apply_policy(fn, MIXED)
    assert wrapped.__name__ == "fn" and wrapped.__doc__ == "Says what."
    assert inspect.signature(wrapped) == inspect.signature(fn)
    jitted = jax.jit(wrapped, static_argnames="mode")
    assert float(jitted(jnp.ones(3), jnp.ones(3), mode="max")) == 1.0


def test_a_policy_by_path_takes_its_parameters_by_position() -> None:
    policy = jt.policy_by_path({"norm": "float32"}, "mixed_float16")
    params = {"dense": jnp.ones(2), "norm": jnp.ones(2)}

    def dtypes(params: Any, x: Any, norm: Any = None) -> Any:
        assert {k: v.dtype for k, v in params.items()} == {"dense": jnp.float16, "norm": jnp.float32}
        assert x.dtype == jnp.float16 and (norm is None or norm.dtype == jnp.float16)
        return x

    fn = jt.apply_policy(dtypes, policy)
    assert fn(params, jnp.ones(2)).dtype == jnp.float32
    assert fn(params, x=jnp.ones(2), norm=jnp.ones(2)).dtype == jnp.float32
    with pytest.raises(TypeError, match="a policy_by_path needs the parameters as the first positional argument"):
        fn(params=params, x=jnp.ones(2))
    grads = jax.grad(jt.apply_policy(lambda p, x: jnp.sum(p["dense"] * x), policy))(params, jnp.ones(2))
    assert grads["dense"].dtype == grads["norm"].dtype == jnp.float32
    assert (grads["dense"].tolist(), grads["norm"].tolist()) == ([1, 1], [0, 0])


X = jnp.ones((4, 3))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_named_policies(half: str) -> None:
    policy = jt.get_policy(f"autocast_{half}")
    assert isinstance(policy, jt.AutocastPolicy)
    assert (policy.autocast_dtype, policy.rules) == (half, jt.TORCH_CUDA)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == (jnp.float32,) * 3
    assert jt.get_policy(str(policy)) == policy
    assert hash(policy) == hash(jt.get_policy(str(policy)))
    assert policy != jt.get_policy("float32")


def test_strings() -> None:
    assert str(jt.get_policy("autocast_float16")) == "p=full,c=full,o=full,a=f16"
    policy = jt.get_policy("output=bfloat16,autocast=bf16,reduce=bf16")
    assert isinstance(policy, jt.AutocastPolicy)
    assert (policy.compute_dtype, policy.output_dtype) == (jnp.float32, jnp.bfloat16)
    assert (policy.reduce_dtype, policy.autocast_dtype) == (jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(ValueError, match="autocast_dtype=float32 must be float16 or bfloat16"):
        jt.get_policy("a=f32")
    with pytest.raises(ValueError, match="rule 'norm' is an autocast policy; only the default can autocast"):
        jt.policy_by_path({"norm": "autocast_float16"})


def test_apply_policy_casts_the_output_of_the_region() -> None:
    policy = jt.get_policy("autocast_float16")
    fn = jt.apply_policy(lambda x: x @ x.T, policy)
    assert fn(X).dtype == jnp.float32
    assert "f16[4,4] = dot_general" in str(jax.make_jaxpr(fn)(X))
    half = jt.apply_policy(lambda x: x @ x.T, policy.with_output_dtype("float16"))
    assert half(X).dtype == jnp.float16


def test_rules_of_ones_own() -> None:
    rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "float32"})
    policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)
    assert "f16" not in str(jax.make_jaxpr(jt.apply_policy(lambda x: x @ x.T, policy))(X))


def test_a_train_step_under_autocast_learns_and_skips() -> None:
    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return optax.l2_loss(jnp.tanh(x @ params["w"]), jnp.full((4, 1), 0.5)).mean()

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    policy = jt.policy_by_path({}, default=jt.get_policy("autocast_float16"))
    for each in (jt.get_policy("autocast_float16"), policy):
        step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=each)
        state = jt.TrainState.create({"w": jnp.full((3, 1), 0.5)}, optimizer)
        assert "f16[4,1] = dot_general" in str(jax.make_jaxpr(step)(state, X))
        losses = []
        for _ in range(20):
            state, metrics = jax.jit(step)(state, X)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.5 * losses[0]
        assert state.params["w"].dtype == jnp.float32
        before = state
        state, metrics = jax.jit(step)(state, X.at[0, 0].set(jnp.inf))
        assert not metrics["grads_finite"]
        assert (state.params["w"] == before.params["w"]).all()
