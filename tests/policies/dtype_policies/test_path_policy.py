from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jmp_train as jt
from jmp_train.policies.pytrees.paths import named_leaves

pytestmark = pytest.mark.quick


def linen_params() -> Any:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.LayerNorm(name="norm")(linen.Dense(3)(x))

    return Net().init(jax.random.key(0), jnp.ones(2))


def nnx_params() -> Any:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    return nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)[1]


def equinox_params() -> Any:
    net = {"dense": eqx.nn.Linear(2, 3, key=jax.random.key(0)), "norm": eqx.nn.LayerNorm(3)}
    return eqx.filter(net, eqx.is_array)


def haiku_params() -> Any:
    def forward(x: jax.Array) -> jax.Array:
        return hk.LayerNorm(-1, True, True, name="norm")(hk.Linear(3)(x))

    return hk.transform(forward).init(jax.random.key(0), jnp.ones((1, 2)))


def plain_params() -> Any:
    return {"dense": {"w": jnp.ones(2), "steps": jnp.arange(2)}, "norm": [jnp.ones(2)]}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [linen_params, nnx_params, equinox_params, haiku_params, plain_params])
def test_norms_in_float32_and_the_rest_in_half(make: Any) -> None:
    params = make()
    policy = jt.policy_by_path({"norm": "float32"}, default="mixed_bfloat16")
    compute, stored = policy.cast_to_compute(params), policy.cast_to_param(params)
    assert jax.tree.structure(compute) == jax.tree.structure(params)
    seen = set()
    for name, x in named_leaves(compute):
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert x.dtype == (jnp.float32 if "norm" in name else jnp.bfloat16), name
            seen.add("norm" in name)
    assert seen == {True, False}
    floats = [x for x in jax.tree.leaves(stored) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


def test_the_first_rule_wins_and_regexes_search() -> None:
    params = {"encoder": {"norm": jnp.ones(1), "w": jnp.ones(1)}, "head": jnp.ones(1)}
    policy = jt.policy_by_path({r"norm$": "float32", "^encoder/": "float16"}, "bfloat16")
    compute = policy.cast_to_compute(params)
    dtypes = {name: x.dtype.name for name, x in named_leaves(compute)}
    assert dtypes == {"encoder/norm": "float32", "encoder/w": "float16", "head": "bfloat16"}


def test_a_rule_that_finds_nothing_lists_the_paths() -> None:
    policy = jt.policy_by_path({"norm": "float32", "embd": "float32", "steps": "float32"})
    with pytest.raises(ValueError, match=r"'embd', 'steps' found no floating") as caught:
        policy.cast_to_compute(plain_params())
    assert "dense/w\n  norm/0" in str(caught.value)
    with pytest.raises(ValueError, match=r"\(none\)"):
        policy.cast_to_param({})


def test_it_is_a_value() -> None:
    make = lambda: jt.policy_by_path({"norm": jt.get_policy("float32")}, "mixed_float16")
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != jt.policy_by_path({"norm": "float32"}, "mixed_bfloat16")
    cast = jax.jit(lambda policy, x: policy.cast_to_compute(x), static_argnums=0)
    assert cast(make(), {"norm": jnp.ones(1)})["norm"].dtype == jnp.float32


def test_outputs_and_reductions_follow_the_default() -> None:
    default = jt.get_policy("p=f32,c=f16,o=bf16,r=f16")
    rule = jt.Policy(jnp.float32, jnp.float32, jnp.float32, jnp.float16)
    policy = jt.policy_by_path({"norm": rule}, default)
    assert (policy.output_dtype, policy.reduce_dtype) == (jnp.bfloat16, jnp.float16)
    assert policy.default is default
    with pytest.raises(ValueError, match="rule 'norm' has reduce_dtype float32 and the default fl"):
        jt.policy_by_path({"norm": "float32"}, default)


def test_wrong_rules_are_named() -> None:
    wrong: Any
    for wrong, error, text in (
        ({"(": "float32"}, ValueError, r"rule '\(' is not a regular expression"),
        ({"norm": "float31"}, ValueError, "Unknown dtype 'float31'"),
        ([("norm", "float32")], TypeError, "rules must be a dict with regular expressions as keys, got list"),
        ({3: "float32"}, TypeError, "rule 3 is not a regular expression"),
        ({"norm": ("float32",)}, TypeError, r"rule 'norm' must be a Policy or the name of one, got \('float"),
        ({"norm": jnp.float32}, TypeError, "rule 'norm' must be a Policy or the name of one"),
    ):
        with pytest.raises(error, match=text):
            jt.policy_by_path(wrong)
    with pytest.raises(TypeError, match="default must be a Policy or the name of one"):
        jt.policy_by_path({"norm": "float32"}, jnp.float16)  # pyright: ignore[reportArgumentType]
