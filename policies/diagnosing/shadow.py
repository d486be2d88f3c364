"""Runs a traced program as it is, and beside it a shadow: the same equations in float32.

Each value is a pair. The actual one is computed in the program's own dtypes; its shadow by the same operations in
float32, from float32 operands, and is left out as long as it is the same number. Booleans and integers have no
shadow: what was compared, picked or counted decides for both, so that both go the same way. Each equation that can
lose something is run a third time, as it is on the shadow's operands, which parts its own error from what it inherits.

Equations are compiled one by one, those that are alike once, so that all that is rounded in the program is rounded
here; so are those within a `shard_map`. Bodies of loops and branches are compiled as one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.arithmetic import bound, in_float32, magnitude_of_terms, rounded
from jmp_train.policies.diagnosing.measures import (
    combine,
    combined,
    is_float,
    is_low,
    measured,
    measured_absorbed,
    measured_whole,
    nothing,
    widened,
)
from jmp_train.policies.diagnosing.programs import BODIES, count_rows, dtype_of, is_measured
from jmp_train.policies.pytrees import has_tracers, is_key

_FIRST = np.float32(0)  # the number of the iteration outside of all loops


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of the program.

    Attributes:
      actual: as the program computes it.
      shadow: in float32; None where it is the same number, or no float.
    """

    actual: Any
    shadow: Any = None


jax.tree_util.register_dataclass(Pair, ("actual", "shadow"), ())

Results = tuple[list[Pair], list[jax.Array]]


class Shadowing:
    """Runs programs beside their shadows; compiles equations that are alike once.

    Args:
      mesh: the devices of the `shard_map` that it runs in, whose values are stacked along a first axis; or None.
      axes: of the mesh, that are mapped.
      iteration: number of the loop iteration that it runs in, counted over all loops around it; float32 scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.float16(1) + x)(jnp.float16(0))
      >>> (pair,), blocks = Shadowing().run(program, [Pair(jnp.float16(0.1))])
      >>> float(pair.actual), round(float(pair.shadow), 6), [block.shape for block in blocks]
      (1.099609375, 1.099976, [(1, 21)])
    """

    def __init__(self, mesh: Any = None, axes: frozenset[str] = frozenset(), iteration: Any = _FIRST) -> None:
        self.mesh = mesh
        self.axes = axes
        self.iteration = iteration

    def run(self, program: Any, operands: Sequence[Pair]) -> Results:
        """Returns the results, and the measures of the program's equations as blocks [rows, columns].

        Args:
          program: a jaxpr, with its constants if it has any.
          operands: its arguments.
        """
        jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        values = dict(zip(jaxpr.constvars, map(self._constant, constants), strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))
        last_use = {atom: i for i, equation in enumerate(jaxpr.eqns) for atom in _variables(equation.invars)}
        wanted = set(_variables(jaxpr.outvars))

        def read(atom: Any) -> Pair:
            return _of_literal(atom) if isinstance(atom, jex.Literal) else values[atom]

        blocks: list[jax.Array] = []
        for i, equation in enumerate(jaxpr.eqns):
            results, found = self._equation(equation, [read(atom) for atom in equation.invars])
            blocks += found
            values.update(zip(equation.outvars, results, strict=True))
            for atom in {*_variables(equation.invars), *equation.outvars}:
                if atom not in wanted and last_use.get(atom, -1) <= i:
                    values.pop(atom, None)  # arrays that nothing reads any more are freed
        return [read(atom) for atom in jaxpr.outvars], blocks

    def _equation(self, equation: Any, inputs: list[Pair]) -> Results:
        name = equation.primitive.name
        if name in BODIES:
            return self.run(equation.params[BODIES[name]], inputs)
        if name == "shard_map" and self.mesh is None and not has_tracers(inputs):
            return self._on_devices(equation, inputs)
        if name in _PROGRAMS:
            results, block, self.iteration = self._jit(_PROGRAMS[name](equation))(inputs, self.iteration)
            return results, [block]
        if not all(_is_array_type(atom) for atom in (*equation.invars, *equation.outvars)):
            return [Pair(result) for result in bound(equation, [pair.actual for pair in inputs])], []
        results, local, terms = self._jit(_once(_Alike(equation)))(inputs)
        if not is_measured(equation):
            return results, []
        return results, [self._measures(equation, inputs, results, local, terms)]

    def _measures(
        self, equation: Any, inputs: list[Pair], results: list[Pair], local: list[Any], terms: Any
    ) -> jax.Array:
        """Returns the measures [1, columns] of an equation's results that are floats, together."""
        floats = [(pair, x) for pair, x in zip(results, local, strict=True) if is_float(dtype_of(pair.actual))]
        measure = self._jit(measured)
        vectors = [measure(pair.actual, pair.shadow, x, terms, self.iteration) for pair, x in floats]
        (first, of_shadow), name = floats[0], equation.primitive.name
        if is_low(dtype_of(first.actual)):
            if name in ("add", "sub", "add_any") and len(inputs) == 2:
                absorbed = self._jit(measured_absorbed)
                vectors.append(absorbed(first.actual, *(pair.actual for pair in inputs)))
            if name in ("convert_element_type", "iota") and of_shadow is not None:
                vectors.append(self._jit(measured_whole)(of_shadow, first.shadow))
        return functools.reduce(combine, vectors)[..., None, :]

    def _jit(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(run, self.mesh, self.axes)

    def _constant(self, array: Any) -> Pair:
        return Pair(array if self.mesh is None or is_key(array) else np.asarray(array))

    def _on_devices(self, equation: Any, inputs: list[Pair]) -> Results:
        """Runs a `shard_map` whose arrays are there equation by equation, each on all devices."""
        params = equation.params
        mesh, axes = params["mesh"], _manual_axes(params)
        stacked = [
            jax.tree.map(_stacking(mesh, axes, spec)[0], pair)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        results, blocks = Shadowing(mesh, axes).run(params["jaxpr"], stacked)
        whole = [
            # What is no jax.Array is a constant, the same on all devices.
            jax.tree.map(_stacking(mesh, axes, spec)[1], pair) if isinstance(pair.actual, jax.Array) else pair
            for pair, spec in zip(results, params["out_specs"], strict=True)
        ]
        return whole, [combined(block) if block.ndim == 3 else block for block in blocks]


@functools.lru_cache(maxsize=4096)
def _compiled(run: Callable[..., Any], mesh: Any, axes: frozenset[str]) -> Callable[..., Any]:
    """Compiles a function; of values that are stacked over the devices of a mesh each device is given its own."""
    if mesh is None:
        return jax.jit(run)

    def unstacked(stacked: Any, same: Any) -> Any:
        own = jax.tree.map(lambda x, y: y if x is None else x[0], stacked, same, is_leaf=lambda x: x is None)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    each = _each_device(mesh, axes)
    compiled = jax.jit(_mapped(unstacked, mesh, axes, (each, P()), each))
    return lambda *args: compiled(*_parted(args))


@functools.lru_cache(maxsize=256)
def _stacking(mesh: Any, axes: frozenset[str], spec: P) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what stacks values that are split over devices along a first axis, and what takes them apart again."""
    each = _each_device(mesh, axes)
    stack = jax.jit(_mapped(lambda x: x[None], mesh, axes, spec, each))
    return stack, jax.jit(_mapped(lambda x: x[0], mesh, axes, each, spec))


def _each_device(mesh: Any, axes: frozenset[str]) -> P:
    return P(tuple(name for name in mesh.axis_names if name in axes))


def _mapped(run: Callable[..., Any], mesh: Any, axes: frozenset[str], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Returns the arrays of a tree that are stacked over devices, and what is the same on all of them."""
    stacked = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)
    return stacked, jax.tree.map(lambda x: None if isinstance(x, jax.Array) else x, tree)


def _in_body(program: Any, operands: Sequence[Pair], iteration: Any) -> tuple[list[Pair], jax.Array, Any]:
    """Runs the body of a loop or branch.

    Returns:
      The results with their shadows, the measures as one array [rows, columns], the number of the next iteration.
    """
    inside = Shadowing(iteration=iteration)
    results, blocks = inside.run(program, operands)
    return [_with_shadow(pair) for pair in results], jnp.concatenate([*blocks, nothing(0)]), inside.iteration


def _scan(equation: Any) -> Callable[..., Any]:
    params, program = equation.params, equation.params["jaxpr"]
    n_consts, n_carry = scan_counts(params)
    rows = count_rows(program)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        consts, start, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]

        def body(carry: Any, x: list[Pair]) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = _in_body(program, [*consts, *values, *x], iteration)
            return (outputs[:n_carry], combine(matrix, found), iteration + 1), outputs[n_carry:]

        first = [_with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (values, matrix, iteration), ys = lax.scan(body, first, xs, **options)
        return [*values, *ys], matrix, iteration

    return run


def _while(equation: Any) -> Callable[..., Any]:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    condition, program = params["cond_jaxpr"], params["body_jaxpr"]
    rows = count_rows(program)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        cond_consts, body_consts, start = inputs[:n_cond], inputs[n_cond:][:n_body], inputs[n_cond + n_body :]

        def go_on(carry: Any) -> jax.Array:
            (flag,) = jex.jaxpr_as_fun(condition)(*(pair.actual for pair in (*cond_consts, *carry[0])))
            return jnp.any(flag)

        def body(carry: Any) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = _in_body(program, [*body_consts, *values], iteration)
            return outputs, combine(matrix, found), iteration + 1

        first = [_with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        return lax.while_loop(go_on, body, first)

    return run


def _cond(equation: Any) -> Callable[..., Any]:
    branches = equation.params["branches"]
    counts = [count_rows(branch) for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def branch(operands: list[Pair], iteration: jax.Array) -> Any:
            results, found, iteration = _in_body(branches[number], operands, iteration)
            matrices = [nothing(count) for count in counts]
            matrices[number] = found
            return results, jnp.concatenate(matrices), iteration

        return branch

    def run(inputs: list[Pair], iteration: Any) -> Any:
        index, *operands = inputs
        programs = [taken(number) for number in range(len(branches))]
        return lax.switch(index.actual, programs, operands, jnp.asarray(iteration))

    return run


def _shard_map(equation: Any) -> Callable[..., Any]:
    """Returns a `shard_map` that is in a program compiled as a whole."""
    params = equation.params
    mesh, axes = params["mesh"], _manual_axes(params)
    each = _each_device(mesh, axes)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        def body(inputs: list[Pair], iteration: jax.Array) -> Any:
            results, matrix, iteration = _in_body(params["jaxpr"], inputs, iteration)
            return results, matrix[None], iteration[None]

        specs = [
            Pair(spec, None if pair.shadow is None else spec)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        out_specs = [
            Pair(spec, spec if is_float(dtype_of(variable)) else None)
            for variable, spec in zip(equation.outvars, params["out_specs"], strict=True)
        ]
        mapped = _mapped(body, mesh, axes, (specs, P()), (out_specs, each, each))
        results, matrices, iterations = mapped(inputs, jnp.asarray(iteration))
        return results, combined(matrices), iterations.max()

    return run


_PROGRAMS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


def _manual_axes(params: dict[str, Any]) -> frozenset[str]:
    return frozenset(params.get("manual_axes") or params["newly_manual_axes"])


class _Alike:
    """An equation that is the same as others with the same operation, parameters and types.

    Args:
      equation: of a traced program.
    """

    def __init__(self, equation: Any) -> None:
        self.equation = equation
        params: Any = tuple(equation.params.items())
        try:
            hash(params)
        except TypeError:  # a parameter that cannot be hashed
            params = id(equation)
        atoms = (*equation.invars, *equation.outvars)
        types = tuple((dtype_of(atom), getattr(atom.aval, "shape", ())) for atom in atoms)
        self._key = equation.primitive, params, types

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key


@functools.lru_cache(maxsize=4096)
def _once(alike: _Alike) -> Callable[..., Any]:
    """Returns an equation as a function of pairs.

    It returns its results, what each would be of the shadow's operands (None where nothing is lost), and of sums in
    lower precision the magnitude of the terms.
    """
    equation = alike.equation
    low = any(is_low(dtype_of(atom)) for atom in (*equation.invars, *equation.outvars))
    loses = low and is_measured(equation)

    def run(inputs: list[Pair]) -> tuple[list[Pair], list[Any], Any]:
        actual = bound(equation, [pair.actual for pair in inputs])
        exact = all(pair.shadow is None for pair in inputs)
        nowhere = [None] * len(actual)
        if exact and not loses:
            return [Pair(x) for x in actual], nowhere, None
        wide = [_shadow_of(pair) for pair in inputs]
        shadows = in_float32(equation, wide)
        if shadows is None:
            return [Pair(x) for x in actual], nowhere, None
        results = [Pair(x, y if is_float(dtype_of(x)) else None) for x, y in zip(actual, shadows, strict=True)]
        if not loses:
            return results, nowhere, None
        local = actual if exact else bound(equation, [_rounded_shadow(pair) for pair in inputs])
        # Behind the barrier, or a compiler may leave the rounding out.
        return results, lax.optimization_barrier(local), magnitude_of_terms(equation, wide)

    return run


def _of_literal(atom: Any) -> Pair:
    return Pair(np.asarray(atom.val, atom.aval.dtype))


def _with_shadow(pair: Pair) -> Pair:
    """Returns a pair of arrays whose shadow is there if it is a float, as loops carry it."""
    if pair.shadow is not None or not is_float(dtype_of(pair.actual)):
        return pair
    return Pair(pair.actual, _shadow_of(pair))


def _shadow_of(pair: Pair) -> Any:
    if pair.shadow is not None:
        return pair.shadow
    dtype = dtype_of(pair.actual)
    return lax.convert_element_type(pair.actual, widened(dtype)) if is_low(dtype) else pair.actual


def _rounded_shadow(pair: Pair) -> Any:
    if pair.shadow is None:
        return pair.actual
    return rounded(pair.shadow, dtype_of(pair.actual))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def _is_array_type(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and hasattr(atom.aval, "shape")
