"""The options of the AMP modes: the originals' names, defaults and illegal combinations; dictionaries and TOML."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

RULES = jt.AutocastRules(primitives=(("dot_general", "float32"), ("exp", "lower")))

# As documented by torch, Apex (frontend.py) and ColossalAI; see the reference of `amp_mode`.
DEFAULTS = {
    "torch": {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
        "rules": None,  # ours
    },
    "apex": {
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": 1.0,  # there None
        "max_loss_scale": 2.0**24,
        "init_scale": 2.0**16,  # this and the next two are of its LossScaler; `initialize` does not take them
        "scale_factor": 2.0,
        "scale_window": 2000,
        "rules": None,  # ours
    },
    "naive": {
        "log_num_zeros_in_grad": False,
        "initial_scale": 2.0**32,
        "min_scale": 1,
        "max_scale": 2.0**32,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "verbose": False,
    },
}


@pytest.mark.parametrize("mode", DEFAULTS)
def test_options_and_defaults_are_the_originals(mode: str) -> None:
    assert dataclasses.asdict(jt.amp_mode(mode).options) == DEFAULTS[mode]
    spelled_out = jt.amp_mode(mode, **DEFAULTS[mode])
    assert spelled_out == jt.amp_mode(jt.policies.AmpType(mode))
    assert hash(spelled_out) == hash(jt.amp_mode(mode))
    assert pickle.loads(pickle.dumps(spelled_out)) == spelled_out  # for worker processes


def apex(level: str, **options: Any) -> jt.policies.Amp:
    return jt.amp_mode("apex", opt_level=level, **options)


def test_apex_levels_are_its_table() -> None:
    found = {}
    for level in ("O0", "O1", "O2", "O3"):
        amp = apex(level)
        p = amp.precision
        autocasts = p.autocast_rules is not None
        dtypes = [dtype and dtype.name for dtype in (p.model_dtype, p.output_dtype)]
        scale = type(amp.loss_scale).__name__, float(amp.loss_scale.loss_scale)
        found[level] = (*dtypes, autocasts, p.keep_batchnorm_fp32, p.master_weights, *scale)
    assert found == {
        "O0": ("float32", "float32", False, False, False, "StaticLossScale", 1.0),
        "O1": (None, None, True, False, False, "DynamicLossScale", 2.0**16),
        "O2": ("float16", "float32", False, True, True, "DynamicLossScale", 2.0**16),
        "O3": ("float16", "float32", False, False, False, "StaticLossScale", 1.0),
    }


def test_an_option_of_apex_overrides_its_level() -> None:
    for level, options, field, wanted in (
        ("O1", {"patch_torch_functions": False}, "autocast_rules", None),
        ("O3", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32", True),
        ("O2", {"keep_batchnorm_fp32": False}, "keep_batchnorm_fp32", False),
        ("O3", {"master_weights": True}, "master_weights", True),
        ("O2", {"master_weights": False}, "master_weights", False),
        ("O2", {"cast_model_type": "bfloat16"}, "model_dtype", jnp.bfloat16),
        ("O3", {"cast_model_type": "bfloat16"}, "model_dtype", jnp.bfloat16),
        ("O2", {"cast_model_type": jnp.float32}, "model_dtype", jnp.float32),
        ("O2", {"cast_model_type": jnp.float32}, "master_weights", False),
        ("O2", {"cast_model_type": False}, "model_dtype", None),
        ("O1", {"cast_model_outputs": "float32"}, "output_dtype", jnp.float32),
        ("O3", {"cast_model_outputs": jnp.float16}, "output_dtype", jnp.float16),
    ):
        found = getattr(apex(level, **options).precision, field)
        assert found is None if wanted is None else found == wanted, (level, options)
    assert apex("O3", cast_model_type="bfloat16").dtype == jnp.bfloat16
    assert apex("O1", cast_model_type=False) != apex("O1")


def test_options_of_apex_reach_the_loss_scale() -> None:
    assert apex("O2", loss_scale="128.0").loss_scale == jt.StaticLossScale(128.0)
    assert apex("O2", loss_scale=64).loss_scale == jt.StaticLossScale(64.0)
    assert float(apex("O3", loss_scale="dynamic").loss_scale.loss_scale) == 2.0**16
    bounded = apex("O2", min_loss_scale=4.0, max_loss_scale=2.0**10).loss_scale
    assert bounded == jt.apex_loss_scale(min_loss_scale=4.0, max_loss_scale=2.0**10)
    assert apex("O1", scale_window=30).loss_scale == jt.apex_loss_scale(scale_window=30, min_loss_scale=1.0)
    floors = [apex("O1", min_loss_scale=x).loss_scale.min_loss_scale for x in (1.0, 0.0, None)]  # pyright: ignore[reportAttributeAccessIssue]
    assert floors == [1.0, 2.0**-126, 2.0**-126]
    several = apex("O1", num_losses=3).loss_scale
    assert isinstance(several, jt.policies.PerLossScale)
    assert len(several.loss_scales) == 3


def test_scaler_options_reach_the_loss_scale() -> None:
    options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    torch = jt.amp_mode("torch", init_scale=8.0, **options)
    assert torch.loss_scale == jt.torch_loss_scale(8.0, 4.0, 0.25, 7)
    naive = jt.amp_mode("naive", initial_scale=8.0, min_scale=2.0, max_scale=16.0, hysteresis=3, **options)
    assert naive.loss_scale == jt.megatron_loss_scale(8.0, 2.0, 4.0, 0.25, 7, 3, 16.0)


@pytest.mark.parametrize("mode", ["torch", "apex", "naive"])
def test_bfloat16_skips_without_a_scale(mode: str) -> None:
    amp = jt.amp_mode(mode, dtype=jnp.bfloat16)
    assert amp.loss_scale == jt.NoOpLossScale()
    assert amp.dtype == jnp.bfloat16


def test_a_scale_that_is_asked_for_is_there_in_bfloat16() -> None:
    amp = apex("O2", cast_model_type="bfloat16", loss_scale="dynamic", max_loss_scale=2.0**8)
    assert float(amp.loss_scale.loss_scale) == 2.0**8
    half = apex("O2", dtype=jnp.bfloat16, cast_model_type="float16", max_loss_scale=2.0)
    assert float(half.loss_scale.loss_scale) == 2.0


# What loss scales refuse themselves is in test_presets.py: here are some, to see that it gets through.
WRONG = [
    ("torch", {"init_scal": 1.0}, "'init_scal' is not an option of mode 'torch'; choose from mode, init"),
    ("apex", {"hysteresis": 2}, "'hysteresis' is not an option of mode 'apex'; choose from mode, enab"),
    ("naive", {"enabled": True}, "'enabled' is not an option of mode 'naive'; choose from mode, log_num"),
    ("naive", {"rules": RULES}, "'rules' is not an option of mode 'naive'; choose from mode, "),
    ("amp", {}, "mode='amp' must be one of 'torch', 'apex', 'naive'"),
    (3, {}, "mode=3 must be one of 'torch', 'apex', 'naive'"),
    ("torch", {"enabled": 2}, "enabled=2 must be True or False"),
    ("torch", {"init_scale": "2"}, "init_scale='2' must be a finite number"),
    ("torch", {"growth_interval": 0}, "growth_interval=0 must be an integer of at least 1"),
    ("naive", {"log_num_zeros_in_grad": "yes"}, "log_num_zeros_in_grad='yes' must be True or False"),
    ("naive", {"verbose": 2}, "verbose=2 must be True or False"),
    ("naive", {"hysteresis": 0}, "hysteresis=0 must be an integer of at least 1"),
    ("naive", {"min_scale": 2.0**33}, "min_scale=8589934592.0 must not exceed the initial scale"),
    ("naive", {"initial_scale": 2.0**33}, "initial_scale=8589934592.0 must not exceed max_scale"),
    ("apex", {"opt_level": "O4"}, "opt_level='O4' must be one of 'O0', 'O1', 'O2', 'O3'"),
    ("apex", {"opt_level": []}, r"opt_level=\[\] must be one of"),
    (
        "apex",
        {"cast_model_type": "float16"},
        r"cast_model_type=dtype\('float16'\) is for opt_level 'O0', 'O2', 'O3', got",
    ),
    ("apex", {"cast_model_type": "int8"}, "cast_model_type='int8' must be one of 'float32', 'float16'"),
    ("apex", {"cast_model_outputs": False}, "cast_model_outputs=False must be one of 'float32', 'f"),
    ("apex", {"cast_model_outputs": "float64"}, "cast_model_outputs='float64' must be one of 'flo"),
    (
        "apex",
        {"keep_batchnorm_fp32": True},
        "keep_batchnorm_fp32=True is for opt_level 'O0', 'O2', 'O3', got opt_level='O1'; leave it out, or choose ",
    ),
    ("apex", {"keep_batchnorm_fp32": "true"}, "keep_batchnorm_fp32='true' must be one of None, True"),
    (
        "apex",
        {"master_weights": False},
        "master_weights=False is for opt_level 'O0', 'O2', 'O3', got",
    ),
    ("apex", {"master_weights": 1}, "master_weights=1 must be one of None, True, False"),
    (
        "apex",
        {"opt_level": "O2", "patch_torch_functions": True},
        "patch_torch_functions=True is for opt_level 'O1', got opt_level='O2'",
    ),
    ("apex", {"patch_torch_functions": "no"}, "patch_torch_functions='no' must be one of None, True"),
    ("apex", {"loss_scale": "static"}, "loss_scale='static' must be a finite number"),
    ("apex", {"loss_scale": 0.0}, r"loss_scale=0.0 must be between 2\*\*-126 and 2\*\*126"),
    ("apex", {"loss_scale": [2.0]}, r"loss_scale=\[2.0\] must be a finite number"),
    ("torch", {"rules": "/"}, "/ is not a regular file"),
    (
        "apex",
        {"opt_level": "O2", "rules": RULES},
        "rules=AutocastRules.* is for opt_level 'O1', got opt_level='O2'",
    ),
    ("apex", {"opt_level": "O3", "min_loss_scale": 2.0}, r"min_loss_scale is for a dynamic .*got StaticLossScale\("),
    ("apex", {"num_losses": 0}, "num_losses=0 must be an integer of at least 1"),
    ("apex", {"verbosity": -1}, "verbosity=-1 must be an integer of at least 0"),
    ("apex", {"min_loss_scale": 2.0**30}, "min_loss_scale=1073741824.0 must not exceed"),
    ("apex", {"max_loss_scale": -1.0}, "max_loss_scale=-1.0 must be between"),
    ("torch", {"dtype": "float32"}, "dtype=float32 must be float16 or bfloat16"),
    (
        "torch",
        {"dtype": "bfloat16", "init_scale": 2.0},
        r"init_scale is for a dynamic .*, got NoOpLossScale\(\)",
    ),
    (
        "apex",
        {"opt_level": "O2", "cast_model_type": "bfloat16", "max_loss_scale": 2.0},
        "max_loss_scale is for a dynamic loss scale, got NoOp",
    ),
]


@pytest.mark.parametrize(("mode", "options", "message"), WRONG)
def test_wrong_options_are_named_with_the_choices(mode: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jt.amp_mode(mode, **options)
    where = re.escape("config: fp16: ")
    with pytest.raises(ValueError, match=where + message):
        jt.amp_from_config({"fp16": {"mode": mode, **options}})


def test_the_tutorials_dictionaries() -> None:
    usual = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    fp16 = {"mode": jt.policies.AmpType.TORCH, **usual, "enabled": True}
    assert jt.amp_from_config({"BATCH_SIZE": 128, "DROP_RATE": 0.1, "fp16": fp16}) == jt.amp_mode("torch")
    assert jt.amp_from_config({"fp16": {"mode": "apex", "opt_level": "O2"}}) == apex("O2")
    naive = {"mode": jt.policies.AmpType.NAIVE, "initial_scale": 2**10, "clip_grad": 1.0}
    with pytest.raises(ValueError, match="'clip_grad' is not an option of mode 'naive'"):
        jt.amp_from_config({"fp16": naive})
    for without in ({}, {"fp16": None}):
        assert not jt.amp_from_config({"clip_grad_norm": 1.0, **without}).enabled
    bfloat16 = jt.amp_from_config({"fp16": {"mode": "naive", "dtype": "bfloat16"}})
    assert bfloat16 == jt.amp_mode("naive", dtype=jnp.bfloat16)


def test_toml_files(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('epochs = 3\n[fp16]\nmode = "apex"\nopt_level = "O2"\nloss_scale = 128.0\n')
    wanted = apex("O2", loss_scale=128.0)
    assert jt.amp_from_config(file) == jt.amp_from_config(str(file)) == wanted
    file.write_text('[fp16]\nmode = "naive"\nhysteresis = "two"\n')
    with pytest.raises(ValueError, match=r"config.toml: fp16: hysteresis='two' must be an integer"):
        jt.amp_from_config(file)
    file.write_text("[fp16\n")
    with pytest.raises(ValueError, match=r"config.toml is not a TOML file: "):
        jt.amp_from_config(file)
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        jt.amp_from_config(tmp_path / "none.toml")


@pytest.mark.parametrize("mode", ["torch", "apex"])
def test_rules_of_autocast_or_a_file_of_them(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    RULES.save(tmp_path / "folder" / "rules.toml")
    amp = jt.amp_mode(mode, rules=RULES)
    assert amp.precision.autocast_rules == RULES
    assert amp != jt.amp_mode(mode)
    assert jt.amp_mode(mode).precision.autocast_rules == (jt.TORCH_CUDA if mode == "torch" else jt.APEX_O1)
    assert len(repr(amp)) < 500  # it is logged
    x = jnp.ones((2, 2))
    run = amp.forward(lambda params, state, batch: (params @ batch, jnp.exp(batch)))
    assert [y.dtype.name for y in run(x, None, x)] == ["float32", "float16"]

    config = tmp_path / "folder" / "config.toml"
    config.write_text(f'[fp16]\nmode = "{mode}"\nrules = "rules.toml"\n')
    assert jt.amp_from_config(config) == amp  # relative to the configuration
    monkeypatch.chdir(tmp_path / "folder")
    for rules in (RULES, "rules.toml", Path("rules.toml"), tmp_path / "folder" / "rules.toml"):
        assert jt.amp_from_config({"fp16": {"mode": mode, "rules": rules}}) == amp
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        jt.amp_mode(mode, rules="none.toml")
    with pytest.raises(TypeError, match="rules=3 must be a path"):
        jt.amp_mode(mode, rules=3)
    (tmp_path / "folder" / "rules.toml").write_text("[")
    with pytest.raises(ValueError, match=r"config.toml: fp16: .*rules.toml is not a TOML file: "):
        jt.amp_from_config(config)


def test_configurations_of_another_type() -> None:
    with pytest.raises(ValueError, match="fp16: mode is missing; choose from 'torch', 'apex', 'naive'"):
        jt.amp_from_config({"fp16": {"opt_level": "O2"}})
    with pytest.raises(TypeError, match="fp16 must be a dictionary of options, got 'O2'"):
        jt.amp_from_config({"fp16": "O2"})
    with pytest.raises(TypeError, match="config must be a dictionary or a TOML file's path, got 3"):
        jt.amp_from_config(3)  # pyright: ignore[reportArgumentType]
