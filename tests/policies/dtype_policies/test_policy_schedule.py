import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmp_train as jt

pytestmark = pytest.mark.quick

FLOAT32_END: dict[float, Any] = {0.0: "mixed_float16", 0.9: "float32"}


@given(st.lists(st.integers(1, 999), min_size=1, max_size=4, unique=True), st.integers(2000, 10**9), st.data())
def test_phases_begin_at_the_nearest_step_and_leave_none_out(thousandths: list[int], total: int, data: Any) -> None:
    shares = [0.0, *(number / 1000 for number in sorted(thousandths))]
    names = ["mixed_float16", "float32"] * 3
    schedule = jt.PolicySchedule(dict(zip(shares, names, strict=False)))
    phases = schedule.phases(total)
    bounds = [phase.start for phase in phases] + [phases[-1].stop]
    assert bounds[0] == 0
    assert bounds[-1] == total
    assert [phase.stop for phase in phases] == bounds[1:]
    for bound, thousandth in zip(bounds[1:], sorted(thousandths), strict=False):
        exact = Fraction(thousandth, 1000) * total
        assert abs(bound - exact) <= Fraction(1, 2) + Fraction(1, 10**6)  # of the share's own rounding

    done = data.draw(st.integers(0, total - 1))
    left = schedule.phases(total, done)
    assert left[0].start == done
    assert left[-1].stop == total
    assert left[1:] == phases[len(phases) - len(left) + 1 :]
    assert schedule.policy_at(done, total) == left[0].policy == schedule.policy_at(left[0].stop - 1, total)


def test_shares_that_are_whole_numbers_of_steps_begin_there() -> None:
    for total in (100, 1000):
        for share in range(1, 100):
            schedule = jt.PolicySchedule({0: "mixed_bfloat16", share / 100: "float32"})
            assert schedule.phases(total)[1].start == share * total // 100


def test_it_is_a_value() -> None:
    schedule = jt.PolicySchedule(FLOAT32_END)
    same = jt.PolicySchedule({0: jt.get_policy("mixed_float16"), 0.9: jt.get_policy("float32")})
    assert schedule == same
    assert hash(schedule) == hash(same)
    assert len({schedule, same, jt.PolicySchedule({0: "mixed_float16", 0.8: "float32"})}) == 2
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert repr(schedule) == "PolicySchedule({0.0: 'p=full,c=f16,o=full', 0.9: 'p=full,c=full,o=full'})"
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.starts = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_policies_by_path_that_store_alike_may_follow_each_other() -> None:
    half = jt.policy_by_path({"norm": "float32"}, "mixed_float16")
    schedule = jt.PolicySchedule({0: half, 0.5: "float32"})
    assert schedule.policy_at(0, 10) == half
    stored = jt.policy_by_path({"norm": "float32"}, "float16")
    full = jt.policy_by_path({"norm": "float32"}, "params=float16,compute=float32")
    assert jt.PolicySchedule({0: stored, 0.5: full}).policy_at(9, 10) == full
    with pytest.raises(ValueError, match=r"a policy by path with the default .* from 0 on, 'p=f16,.*' in float16 from"):
        jt.PolicySchedule({0: stored, 0.5: "float16"})


def test_policies_that_store_parameters_differently_are_refused_by_name() -> None:
    text = (
        r"all policies of a schedule must store the parameters in the same dtypes: 'p=f16,c=f16,o=f16' in float16 "
        r"from 0 on, 'p=full,c=full,o=full' in float32 from 0\.75 on\. To compute in float32 with the parameters of"
    )
    with pytest.raises(ValueError, match=text):
        jt.PolicySchedule({0: "float16", 0.75: "float32"})
    jt.PolicySchedule({0: "float16", 0.75: "params=float16,compute=float32,output=float32"})  # what the error names


def test_what_is_no_schedule_is_named() -> None:
    no_fraction = "must be a fraction of the run, from 0 to below 1, not a number of steps"
    wrong: Any
    for wrong, error, text in (
        ([0.0, "float32"], TypeError, "policies must map fractions of the run to policies, got"),
        ({}, ValueError, r"the first fraction must be 0, the start of the run, got \[\]"),
        ({0.1: "float32"}, ValueError, r"the first fraction must be 0, the start of the run, got \[0\.1\]"),
        ({0: "float32", 1.0: "float32"}, ValueError, f"1.0 {no_fraction}"),
        ({0: "float32", 900: "float32"}, ValueError, f"900 {no_fraction}"),
        ({0: "float32", float("nan"): "float32"}, ValueError, f"nan {no_fraction}"),
        ({0: "float32", "0.9": "float32"}, TypeError, "fractions of the run must be numbers, got '0.9'"),
        ({0: "float32", 0.5: "float32", 0.2: "float32"}, ValueError, r"fractions must increase, got \[0, 0\.5, 0\.2\]"),
        ({0: "float32", 0.5: jnp.float32}, TypeError, r"policies\[0.5\] must be a Policy, a PathPolicy or a name"),
        ({0: "float32", 0.5: "float31"}, ValueError, "Unknown dtype 'float31'"),
    ):
        with pytest.raises(error, match=text):
            jt.PolicySchedule(wrong)


def test_a_phase_without_a_step_and_steps_out_of_range_are_named() -> None:
    schedule = jt.PolicySchedule(FLOAT32_END)
    no_step = r"a run of 4 steps has no step for the phase that starts at 0\.9; use more steps or other fractions"
    with pytest.raises(ValueError, match=no_step):
        schedule.phases(4)
    with pytest.raises(ValueError, match="start=11 must be from 0 to total_steps=10"):
        schedule.phases(10, 11)
    with pytest.raises(ValueError, match="start=-1 must be"):
        schedule.policy_at(-1, 10)
    assert schedule.phases(10, 10) == ()
    assert schedule.policy_at(10, 10) == jt.get_policy("float32")


def test_steps_are_made_when_they_are_wanted_and_once_for_each_policy() -> None:
    schedule = jt.PolicySchedule({0: "mixed_float16", 0.5: "float32", 0.75: "mixed_float16"})
    made: list[Any] = []

    def make_step(policy: Any) -> Any:
        made.append(policy)
        return len(made)

    steps = schedule.steps(make_step, 8)
    assert made == []
    assert [next(steps) for _ in range(4)] == [1] * 4
    assert made == [jt.get_policy("mixed_float16")]
    assert list(steps) == [2, 2, 1, 1]
    assert list(schedule.steps(make_step, 8, start=5)) == [3, 4, 4]
    with pytest.raises(ValueError, match="a run of 1 steps has no step for the phase that starts at"):
        schedule.steps(make_step, 1)  # at once, and not at the first step


def test_a_train_step_says_what_to_do_with_a_schedule() -> None:
    with pytest.raises(TypeError, match=r"policy must be a single policy, got a PolicySchedule; .*schedule\.steps\("):
        jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), jax.tree.map, policy=jt.PolicySchedule(FLOAT32_END))  # pyright: ignore[reportArgumentType]
