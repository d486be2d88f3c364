"""Every reading of a program runs all that holds programs: one contract for all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_train.policies import autocast
from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.autocasting.emulating import emulated_autocast
from jmp_train.policies.dtype_policies.float32_sums import ReadCounts, _Sums
from jmp_train.policies.programs import IN_JAX, IN_PYTHON, INLINED, Reading
from jmp_train.tools.checking_parity.rerunning import Rerun
from jmp_train.tools.diagnosing import Pair, record
from jmp_train.tools.diagnosing.shadow import Shadowing

pytestmark = [pytest.mark.quick, pytest.mark.newest]

X = np.linspace(0.25, 2.0, 8, dtype=np.float32)
Program = Callable[..., Any]


class InJax(Reading[Any]):
    table = IN_JAX


class InPython(Reading[Any]):
    table = IN_PYTHON


class Inlined(Reading[Any]):
    table = INLINED


def run_again(reading: Reading[Any]) -> Callable[..., Any]:
    return lambda program, arrays: reading.evaluate(program, arrays)


def run_autocast(program: Any, arrays: Sequence[Any]) -> Any:
    return autocast(jaxpr_as_fun(program), rules=AutocastRules())(*arrays)


def run_emulation(program: Any, arrays: Sequence[Any]) -> Any:
    return emulated_autocast(jaxpr_as_fun(program), jnp.float16, lambda *_: False)(*arrays)


def run_shadow(program: Any, arrays: Sequence[Any]) -> Any:
    return [pair.actual for pair in Shadowing().run(program, list(map(Pair, arrays)))[0]]


def run_recorder(program: Any, arrays: Sequence[Any]) -> Any:
    return [pair.actual for pair in record(program, arrays, lambda pair: None)[1]]


def run_float32_sums(program: Any, arrays: Sequence[Any]) -> Any:
    counts = ReadCounts().of(program, [True] * len(arrays))
    return _Sums(counts).evaluate(program, arrays)


READINGS: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "in jax": run_again(InJax()),
    "in python": run_again(InPython()),
    "inlined": run_again(Inlined()),
    "autocast": run_autocast,
    "emulation": run_emulation,
    "shadow": run_shadow,
    "recorder": run_recorder,
    "rerun": lambda program, arrays: Rerun(program, arrays).results({}),
    "float32 sums": run_float32_sums,
}


def while_loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3.0, lambda c: (c[0] * 1.75 + x * 0, c[1] + 1), (x, 0))


def nested_whiles(x: Any) -> Any:
    def outer(c: Any) -> Any:
        return lax.while_loop(lambda v: v < c * 2, lambda v: v * 1.3, c)

    return lax.while_loop(lambda c: c < 5.0, outer, x)


def while_of_keys(x: Any) -> Any:
    def body(c: Any) -> Any:
        key, total = c
        key, own = jax.random.split(key)
        return key, total + jax.random.uniform(own)

    key, total = lax.while_loop(lambda c: c[1] < 3, body, (jax.random.key(3), x))
    return total, jax.random.key_data(key)


def scan_of_keys(x: Any) -> Any:
    keys = jax.random.split(jax.random.key(1), 3)
    return lax.scan(lambda c, key: (c + jax.random.uniform(key), jax.random.bits(key)), x, keys)


def while_in_scan(x: Any) -> Any:
    return lax.scan(lambda c, t: (nested_whiles(c * t), c), x, jnp.array([0.5, 0.25, 1.0]))


def scan_in_while(x: Any) -> Any:
    def body(c: Any) -> Any:
        return lax.scan(lambda c, t: (c * t, None), c, jnp.array([1.5, 1.25]))[0]

    return lax.while_loop(lambda c: c < 4.0, body, x)


def reversed_scan(x: Any) -> Any:
    return lax.scan(lambda c, t: (c * x + t, c), x, jnp.arange(3.0), reverse=True)


def unrolled_scan(x: Any) -> Any:
    return lax.scan(lambda c, t: (jnp.sin(c) + t, c * t), x, jnp.arange(5.0), unroll=2)


def empty_scan(x: Any) -> Any:
    return lax.scan(lambda c, t: (c * 2, c + t), x, jnp.zeros(0))


def scan_without_rows(x: Any) -> Any:
    return lax.scan(lambda c, _: (c * 1.5, c), x, None, length=3)


def cond(x: Any) -> Any:
    return lax.cond(x.sum() > 1.0, lambda x: (jnp.sin(x), 1), lambda x: (x * 2, 0), x)


def switch(x: Any) -> Any:
    branches = [jnp.sin, lambda x: while_loop(x)[0], lambda x: empty_scan(x)[0], jax.jit(jnp.cos)]
    return lax.switch(jnp.int32(x.sum() * 2) % 5 - 1, branches, x)


def platform_branches(x: Any) -> Any:
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def remat(x: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * x), policy=jax.checkpoint_policies.dots_saveable)(x)


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    return jnp.sin(x) * 2


own_jvp.defjvp(lambda p, t: (own_jvp(*p), 7 * t[0]))


@jax.custom_vjp
def own_vjp(x: Any) -> Any:
    return reversed_scan(x)[0]


own_vjp.defvjp(lambda x: (own_vjp(x), x), lambda x, g: (g * x * 5,))


@jax.custom_batching.custom_vmap
def own_vmap(x: Any) -> Any:
    return jnp.cos(x) + 1


@own_vmap.def_vmap
def _(size: int, mapped: Any, x: Any) -> Any:
    del size
    return own_vmap(x), mapped[0]


def without_results(x: Any) -> Any:
    def send(x: Any) -> None:
        jax.debug.callback(lambda _: None, x)

    def body(c: Any, t: Any) -> Any:
        send(c)
        return c + t, None

    jax.jit(send)(x)
    lax.cond(x > 1.0, send, lambda x: None, x)
    return lax.scan(body, x, jnp.arange(2.0))[0]


def calls(x: Any) -> Any:
    return jax.jit(lambda x: own_jvp(x) + jax.jit(own_vjp)(x * 0.5))(x) + jax.closure_convert(jnp.sin, x)[0](x)


def shard_map(x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    specs: Any = {"in_specs": P("devices"), "out_specs": (P("devices"), P())}

    def body(x: Any) -> Any:
        return scan_in_while(x.max()) + x, lax.psum(switch(x.sum()), "devices")

    return jax.shard_map(body, mesh=mesh, check_vma=False, **specs)(x)


def everything(x: Any) -> Any:
    def body(c: Any, t: Any) -> Any:
        c = lax.cond(t > 1, jax.checkpoint(calls), lambda c: while_in_scan(c)[0], c)
        return while_loop(c)[0] * 0.3, lax.switch(jnp.int32(t), [remat, nested_whiles, own_vjp], c)

    return lax.scan(body, x, jnp.arange(3.0))


def of_references(loop: Callable[[Any, Any], Any]) -> Program:
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        result = loop(ref, x)
        return result, ref[...]

    return fn


def while_with_ref(ref: Any, x: Any) -> Any:
    def body(c: Any) -> Any:
        ref[...] = ref[...] * 2
        return c * 1.75

    return lax.while_loop(lambda c: c < 3.0, body, x)


def scan_with_ref(ref: Any, x: Any) -> Any:
    def body(c: Any, t: Any) -> Any:
        ref[...] = ref[...] * t
        return c + ref[...], c

    return lax.scan(body, x, jnp.arange(1.0, 4.0))


BATCHED = (while_loop, nested_whiles, while_of_keys, while_in_scan, scan_in_while)
REFERENCES = (of_references(while_with_ref), of_references(scan_with_ref))
WHOLE = (
    reversed_scan,
    unrolled_scan,
    empty_scan,
    scan_without_rows,
    scan_of_keys,
    cond,
    switch,
    remat,
    calls,
    own_vmap,
    without_results,
)


def together(fns: Sequence[Program]) -> Program:
    return lambda x: [fn(x * (1 + 0.1 * i)) for i, fn in enumerate(fns)]


def gradient(x: Any) -> Any:
    return jax.grad(lambda x: sum(jnp.sum(y) for y in [*jax.tree.leaves(together(WHOLE[:4])(x)), calls(x)]))(x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "while under vmap": jax.vmap(together(BATCHED)),
    "references under vmap": jax.vmap(together(REFERENCES)),
    "whole": lambda x: together(WHOLE)(x[3]),
    "platforms": lambda x: platform_branches(x),
    "shard_map": lambda x: shard_map(x[2:4]),
    "gradient": lambda x: gradient(x[3]),
    "nested": lambda x: everything(x[3]),
    "vmap of all": jax.vmap(together(WHOLE)),
    "vmap of nested": jax.vmap(everything),
    "vmap of gradient": jax.vmap(gradient),
}


@pytest.mark.quick_cases(4)
@pytest.mark.filterwarnings("ignore:the gradient taken at")
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reading_that_changes_nothing_returns_what_the_program_returns(name: str, reading: str) -> None:
    program = jax.make_jaxpr(PROGRAMS[name])(X)
    expected = jax.tree.leaves(PROGRAMS[name](X))
    found = READINGS[reading](program, [X])
    for got, x in zip(found, expected, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)
