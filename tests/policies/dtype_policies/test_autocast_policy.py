import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

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
