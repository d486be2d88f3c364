"""Where files lie that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of what can be made again: `$JMP_TRAIN_CACHE`, or jmp_train in `$XDG_CACHE_HOME` or ~/.cache.

    Example:
      >>> os.environ["JMP_TRAIN_CACHE"] = "/scratch/jmp_train"
      >>> str(cache_folder())
      '/scratch/jmp_train'
      >>> del os.environ["JMP_TRAIN_CACHE"]
    """
    if own := os.environ.get("JMP_TRAIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmp_train"
