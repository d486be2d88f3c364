"""The devices that programs can be compiled for without having them.

What the rest of this room, and plans, read of a device are the attributes that `GPU` and `TPU` have in common: `name`,
`description`, `platform`, `memory_bytes`, `bandwidth`, `rates`, `matrix_rate`, `link`, `link_bandwidth`,
`l2_cache_size`, `overlaps` and `topology`.
"""

from jmp_train.aot.gpus import GPU
from jmp_train.aot.tpus import TPU

Device = GPU | TPU
