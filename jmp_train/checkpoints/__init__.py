"""Checkpoints of whole training states, and weights as safetensors files."""

from jmp_train.checkpoints.leaves import Leaf as Leaf
from jmp_train.checkpoints.leaves import as_ascii as as_ascii
from jmp_train.checkpoints.leaves import differences as differences
from jmp_train.checkpoints.leaves import is_count as is_count
from jmp_train.checkpoints.leaves import leaf_of as leaf_of
from jmp_train.checkpoints.leaves import leaves_in as leaves_in
from jmp_train.checkpoints.leaves import leaves_of as leaves_of
from jmp_train.checkpoints.step_files import in_file as in_file
from jmp_train.checkpoints.store import CheckpointStore as CheckpointStore
from jmp_train.checkpoints.weights import load_weights as load_weights
from jmp_train.checkpoints.weights import save_weights as save_weights
from jmp_train.policies.files import DamagedError as DamagedError

# Names for users; other packages of the library import the rest.
__all__ = (
    "CheckpointStore",
    "DamagedError",
    "load_weights",
    "save_weights",
)
