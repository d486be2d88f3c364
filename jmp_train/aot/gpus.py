"""NVIDIA GPUs by name, described as XLA's compiler wants it."""

from collections.abc import Mapping
from types import MappingProxyType


def _target_config(description: str, capability: tuple[int, int], **fields: float) -> str:
    """Returns XLA's text about a GPU: what all of them share and what is this one's."""
    own = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
{own}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{description}"
"""


GPUS: Mapping[str, str] = MappingProxyType(
    {
        "V100-16GB": _target_config(
            "Tesla V100-SXM2-16GB",
            (7, 0),
            core_count=80,
            fpus_per_core=64,
            shared_memory_per_core=98304,
            shared_memory_per_block_optin=98304,
            memory_bandwidth=898048000000,
            l2_cache_size=6291456,
            clock_rate_ghz=1.53,
            device_memory_size=16914055168,
        ),
        "A100-40GB": _target_config(
            "NVIDIA A100-SXM4-40GB",
            (8, 0),
            core_count=108,
            fpus_per_core=64,
            shared_memory_per_core=167936,
            shared_memory_per_block_optin=166912,
            memory_bandwidth=1555000000000,
            l2_cache_size=41943040,
            clock_rate_ghz=1.41,
            device_memory_size=42505273344,
        ),
        "H100-80GB": _target_config(
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            core_count=132,
            fpus_per_core=128,
            shared_memory_per_core=233472,
            shared_memory_per_block_optin=232448,
            memory_bandwidth=3352320000000,
            l2_cache_size=52428800,
            clock_rate_ghz=1.98,
            device_memory_size=84929347584,
        ),
    }
)
"""What `jmp_train.aot.compilation` can compile for: texts of XLA's `GpuTargetConfigProto` by name."""
