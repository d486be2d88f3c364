"""Limits on the memory that reading a data file may take."""

import sys
from pathlib import Path

from jmp_train.graphs.structure import as_count
from jmp_train.policies.files import DamagedError

# The needs of the public data sets. Cora's allx takes 9.8 MB from a file of 0.26; Citeseer's, 34 MB, and Pubmed's,
# 36 MB, have 32 and 50 words per row of 8 or 12 bytes each: 60 times the file at most. ogbn-arxiv and ogbn-products
# have 87 MB and 980 MB of features, 9 MB and 495 MB of edges; as text of random digits they shrink to a third.
# Reddit has 561 MB of features and 0.9 or 1.8 GB of edges, whose senders hardly shrink. A single sorted array of
# ids shrinks to a 500th, so the limit applies to archives as a whole.
_LEAST = 2**28
_TIMES = 100


def most_bytes(max_bytes: int | None, *paths: Path) -> int:
    r"""Returns the largest number of bytes for the arrays from some files together.

    Args:
      max_bytes: the limit; None for 100 times the files' size, and 256 MiB at least.
      paths: the files.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "file"
      >>> _ = file.write_bytes(b"1\n")
      >>> most_bytes(None, file), most_bytes(1000, file)
      (268435456, 1000)
    """
    if max_bytes is not None:
        return as_count("max_bytes", max_bytes, sys.maxsize)
    return max(_LEAST, _TIMES * sum(path.stat().st_size for path in paths))


def check_bytes(what: str, count: int, most: int) -> None:
    """Raises DamagedError if something would take too many bytes.

    Args:
      what: the file, and the part of it, for the message.
      count: number of bytes needed.
      most: number of bytes allowed.

    Example:
      >>> try:
      ...     check_bytes("cora.allx: a matrix [9, 9]", 324, 300)
      ... except DamagedError as fault:
      ...     print(fault)
      cora.allx: a matrix [9, 9] would take 324 bytes, more than the limit of 300; raise it with max_bytes=
    """
    if count > most:
        raise DamagedError(f"{what} would take {count} bytes, more than the limit of {most}; raise it with max_bytes=")
