"""Checkpoints of whole training states, and weights as safetensors files."""

from jmp_train.checkpoints import flax_serialization as flax_serialization  # registers its types
from jmp_train.checkpoints.manifest import DamagedError as DamagedError
from jmp_train.checkpoints.store import CheckpointStore as CheckpointStore
from jmp_train.checkpoints.weights import load_weights as load_weights
from jmp_train.checkpoints.weights import save_weights as save_weights
