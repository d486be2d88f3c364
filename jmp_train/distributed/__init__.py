"""Several processes that train as one."""

from jmp_train.distributed.background import BackgroundWriter as BackgroundWriter
from jmp_train.distributed.processes import StopSignals as StopSignals
from jmp_train.distributed.processes import end_at_once as end_at_once
from jmp_train.distributed.processes import initialize as initialize
from jmp_train.distributed.processes import is_main_process as is_main_process
from jmp_train.distributed.shared_arrays import as_bytes as as_bytes
from jmp_train.distributed.shared_arrays import broadcast_arrays as broadcast_arrays
from jmp_train.distributed.shared_arrays import broadcast_state as broadcast_state
from jmp_train.distributed.shared_arrays import check_agreement as check_agreement
from jmp_train.distributed.shared_arrays import gather_texts as gather_texts
from jmp_train.distributed.shared_arrays import is_divided as is_divided
from jmp_train.distributed.shared_arrays import key_implementation as key_implementation
from jmp_train.distributed.shared_arrays import local_data as local_data
from jmp_train.distributed.shared_arrays import placement as placement
from jmp_train.distributed.shared_arrays import to_host as to_host
from jmp_train.distributed.shared_arrays import to_leaf as to_leaf

# Names for users; other packages of the library import the rest.
__all__ = (
    "StopSignals",
    "broadcast_state",
    "check_agreement",
    "initialize",
    "is_main_process",
)
