"""Names in rules that jax does not have are refused with the nearest ones; names of users' own functions are not."""

from pathlib import Path

import jax.extend.core as jex
import pytest
from jax.interpreters import batching

import jmp_train as jt

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exponential",
            r"primitives: jax has no primitive 'exponential'; the nearest are 'exp'\. .* functions=\{'expo",
        ),
        ("tahn", "no primitive 'tahn'; the nearest are .*'tanh'"),
        ("dot", "no primitive 'dot'; the nearest are 'dot_general'"),
        ("conv", "no primitive 'conv'; the nearest are 'conv_general_dilated'"),
        ("softmax", r"no primitive 'softmax'.*'softmax' is a function of jax: functions=\{'softmax': \.\.\.\}"),
    ],
)
def test_a_primitive_that_jax_does_not_have_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        jt.TORCH_CUDA.replace(primitives={name: "float32"})
    file = tmp_path / "rules.toml"
    file.write_text(f'format = "jmp_train autocast rules"\nversion = 1\nprimitives = [["{name}", "float32"]]\n')
    with pytest.raises(ValueError, match=f"rules.toml: .*{message}"):
        jt.AutocastRules.load(file)


@pytest.mark.parametrize("name", ["pallas_call", "pjit", "scatter-add", "scatter_add", "random_bits", "all_gather"])
def test_primitives_of_jax_are_known_in_all_its_releases(name: str) -> None:
    assert (name, "keep") in jt.TORCH_CUDA.replace(primitives={name: "keep"}).primitives


def test_a_primitive_of_an_extension_is_known() -> None:
    own = jex.Primitive("exponential_of_mine")
    with pytest.raises(ValueError, match="no primitive 'exponential_of_mine'"):
        jt.AutocastRules(primitives=((own.name, "keep"),))
    batching.primitive_batchers[own] = lambda operands, axes: (own.bind(*operands), axes[0])
    try:
        assert jt.AutocastRules(primitives=((own.name, "keep"),)).primitives == (("exponential_of_mine", "keep"),)
    finally:  # jax keeps it for the whole process, where errors of other tests would propose its name
        del batching.primitive_batchers[own]


@pytest.mark.parametrize(
    ("name", "near"),
    [("log_softmaks", "log_softmax"), ("lognsumexp", "logsumexp"), ("dot_product_atention", "dot_product_attention")],
)
def test_a_slip_in_the_name_of_a_function_is_refused(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"functions: jax has no function '{name}'; the nearest are '{near}'"):
        jt.TORCH_CUDA.replace(functions={name: "float32"})
    with pytest.raises(ValueError, match=r"jax has no module 'jax.numpy.linlag'; the nearest are 'linalg'"):
        jt.TORCH_CUDA.replace(functions={"jax.numpy.linlag": "float32"})


@pytest.mark.parametrize(
    "name",
    ["attend", "geglu", "my_softmax", "softmax2", "log_soft_max", "_log_softmax", "rms_norm", "multi_head_attention",
     "cross_entropy", "jax.nn.functions", "jax.scipy.stats", "logsumexp"],
)  # fmt: skip
def test_other_names_may_be_those_of_a_users_functions(name: str) -> None:
    assert dict(jt.TORCH_CUDA.replace(functions={name: "float32"}).functions)[name] == "float32"
