"""The networks in torch that `benchmarks/gpu.py` compares with ours are ours: the same logits, as many parameters."""

import importlib
import importlib.util
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from models.convolution import ResNet
from models.vision_transformer import VisionTransformer

pytestmark = pytest.mark.quick


@pytest.fixture(name="models", scope="module")
def fixture_models() -> Any:
    """The file of the benchmarks that torch's processes import."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not there: install it to compare")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("gpu_torch_models")


def torch_weights(params: Any, batch_stats: Any, kernel_axes: tuple[int, ...]) -> dict[str, Any]:
    """Returns our parameters and statistics by torch's names, in torch's layouts; those of convolutions by axes."""
    ends = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    weights = {}
    for path, array in jax.tree_util.tree_leaves_with_path((params, batch_stats)):
        *modules, end = (entry.key for entry in path[1:])
        values = np.asarray(array)
        if end == "kernel":
            values = values.transpose(kernel_axes if values.ndim == 4 else (1, 0))
        weights[".".join([*modules, ends.get(end, end)])] = values
    return weights


def random_like(tree: Any, seed: int) -> Any:
    """Returns values near 0.3, of which all matter; also as variances."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (0.3 + 0.1 * random.standard_normal(x.shape)).astype(np.float32), tree)


NETWORKS = {  # ours, torch's with the same sizes, how our convolutions' kernels become torch's
    "ResNet": (
        lambda: ResNet((1, 2), (4, 6)),
        {"stages": (1, 2), "features": (4, 6)},
        (0, 3, 1, 2),
    ),
    "VisionTransformer": (
        lambda: VisionTransformer(5, patch=16, width=12, depth=2, heads=3, mlp=20),
        {"image_size": 32, "classes": 5, "width": 12, "depth": 2, "heads": 3, "mlp": 20},
        (3, 2, 0, 1),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_steps_the_same_network(name: str, models: Any) -> None:
    torch = models.torch
    make, sizes, kernel_axes = NETWORKS[name]
    ours, torchs = make(), getattr(models, name)(**sizes).eval()
    images = np.random.default_rng(0).standard_normal((3, 32, 32, 3)).astype(np.float32)
    variables = jax.eval_shape(lambda: ours.init(jax.random.key(0), images, train=False))
    variables = random_like(variables, seed=1)
    weights = torch_weights(variables["params"], variables.get("batch_stats", {}), kernel_axes)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in weights.items()}
    loaded = torchs.load_state_dict(tensors, strict=False)
    assert loaded.unexpected_keys == []
    assert all(key.endswith("num_batches_tracked") for key in loaded.missing_keys)
    with torch.no_grad():
        wanted = torchs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    logits = jax.jit(lambda variables, images: ours.apply(variables, images, train=False))
    np.testing.assert_allclose(logits(variables, images), wanted, rtol=1e-4)
    assert np.ptp(wanted, axis=0).min() > 1e-3  # the images differ in all logits


@pytest.mark.parametrize(("name", "count"), [("ResNet", 21_282_122), ("VisionTransformer", 86_567_656)])
def test_torchs_networks_have_as_many_parameters_as_ours(name: str, count: int, models: Any) -> None:
    with models.torch.device("meta"):
        model = getattr(models, name)()
    assert sum(x.numel() for x in model.parameters()) == count
