"""Of a program that runs operation by operation, every result is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.tools.diagnosing import Pair, record

pytestmark = pytest.mark.quick


def test_every_run_is_kept_with_its_shadow_and_what_it_reads() -> None:
    def kept(pair: Pair) -> tuple[float, float]:
        shadow = pair.actual if pair.shadow is None else pair.shadow
        return float(np.ravel(pair.actual)[0]), float(np.ravel(shadow)[0])

    def fn(x: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, _: (carry * jnp.float16(1.1), None), x, length=3)[0] + jnp.float16(1)

    operations, (result,), (origins,) = record(jax.make_jaxpr(fn)(jnp.float16(1)), [jnp.float16(1)], kept)
    (times, plus) = (next(op for op in operations if op.equation.primitive.name == name) for name in ("mul", "add"))
    factor = float(np.float16(1.1))
    np.testing.assert_allclose([run[0][1] for run in times.kept], [factor, factor**2, factor**3], rtol=1e-6)
    actual = np.float16(1)
    for run in times.kept:
        actual = actual * np.float16(1.1)
        assert run[0][0] == actual
    numbers = {id(op): number for number, op in enumerate(operations)}
    assert numbers[id(times)] in times.reads  # of the iteration before
    assert numbers[id(times)] in plus.reads
    assert origins == {numbers[id(plus)]}
    assert float(result.shadow) == pytest.approx(factor**3 + 1, rel=1e-6)
    assert times.line.endswith(f":{fn.__code__.co_firstlineno + 1}")
    assert __file__ in times.line
