"""A checkpoint's arrays in orbax's format, a folder for each leaf; written and read by process 0 alone."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.checkpoint_files import DamagedError
from jmp_train.checkpoint_leaves import digest


def save_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes named arrays, none of them without elements, into a new folder."""
    import orbax.checkpoint as ocp

    with _without_warnings_of_merging():
        _checkpointer().save(folder, args=ocp.args.PyTreeSave(arrays))


def load_arrays(folder: Path, leaves: list[dict[str, Any]]) -> list[np.ndarray]:
    """Returns the leaves' arrays; raises DamagedError if one is not what was saved."""
    import orbax.checkpoint as ocp

    empty = {x["folder"]: np.zeros(x["shape"], x["dtype"]) for x in leaves if 0 in x["shape"]}
    like = {x["folder"]: 0 for x in leaves if x["folder"] not in empty}
    as_numpy = dict.fromkeys(like, ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        loaded = _checkpointer().restore(
            folder, args=ocp.args.PyTreeRestore(item=like, restore_args=as_numpy)
        )
    except Exception as error:  # though every file is as it was written
        raise DamagedError(f"orbax cannot read {folder}: {error}") from error
    arrays = []
    for x in leaves:
        arrays.append(np.asarray(empty.get(x["folder"], loaded.get(x["folder"]))))
        if digest(arrays[-1]) != x["sha256"]:
            raise DamagedError(f"leaf {x['path']} is not what was saved")
    return arrays


def _checkpointer() -> Any:
    """Returns orbax's checkpointer of process 0 alone, with a folder for each leaf."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _without_warnings_of_merging() -> Iterator[None]:
    """Leaves out what orbax logs, from this thread, of a format that is not used here."""
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread or "Skipping merge of OCDBT" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
