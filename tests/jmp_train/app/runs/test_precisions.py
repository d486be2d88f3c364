import pytest

from jmp_train.app.runs.precisions import NamedPhase, is_schedule, phase_bounds, phases_named, schedule_name

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("apex-O2", [(0.0, "apex-O2")]),
        ("p=f32,c=f16,o=f32", [(0.0, "p=f32,c=f16,o=f32")]),
        ("mixed_float16,0.9:float32", [(0.0, "mixed_float16"), (0.9, "float32")]),
        ("0:c=f16,o=f32,.5:p=f32,c=bf16,1e-1:x", None),  # shares fall
        ("0.0:c=f16,o=f32,1e-1:p=f32,c=bf16,.5:x", [(0.0, "c=f16,o=f32"), (0.1, "p=f32,c=bf16"), (0.5, "x")]),
    ],
)
def test_commas_within_policies_are_not_between_phases(name: str, phases: list[tuple[float, str]] | None) -> None:
    if phases is None:
        with pytest.raises(ValueError, match=r"fractions must increase, got \[0\.0, 0\.5, 0\.1\]"):
            phases_named(name)
        return
    assert phases_named(name) == tuple(NamedPhase(*phase) for phase in phases)
    assert is_schedule(name) == (len(phases) > 1)
    assert phases_named(schedule_name(name)) == phases_named(name)


def test_a_schedule_has_one_name() -> None:
    names = ("mixed_float16,0.9:float32", "0:mixed_float16,.9:float32", "0.0:mixed_float16,0.900:float32")
    assert {schedule_name(name) for name in names} == {names[0]}
    assert schedule_name("c=f16,o=f32") == "c=f16,o=f32"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "float32:0.9",
            "'float32' in 'float32:0.9' is not a fraction of the run; write a schedule as NAME,FRACTION:NAME",
        ),
        ("a,-0.1:b", "'-0.1' in 'a,-0.1:b' is not a fraction of the run; write a schedule as"),
        ("a,90%:b", "'90%' in 'a,90%:b' is not a fraction of the run; write a schedule as"),
        ("a,0.5:b:c", "'0.5:b' in 'a,0.5:b:c' is not a fraction of the run; write a schedule as"),
        ("a,900:b", "'a,900:b': 900.0 must be a fraction of the run, from 0 to below 1, not a number of steps"),
        ("0.9:float32", "'0.9:float32': the first fraction must be 0, the start of the run"),
    ],
)
def test_what_is_no_share_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        phases_named(name)


def test_a_run_too_short_for_a_phase_is_named() -> None:
    assert phase_bounds("float32", 1) == ((0, 1),)
    assert phase_bounds("a,0.5:b,0.9:c", 10) == ((0, 5), (5, 9), (9, 10))
    with pytest.raises(ValueError, match=r"'a,0\.9:b': a run of 4 steps has no step for the phase that"):
        phase_bounds("a,0.9:b", 4)
