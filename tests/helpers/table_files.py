"""Tables in csv files, as OGB's data sets have them."""

import gzip
from collections.abc import Mapping
from pathlib import Path


def write_tables(folder: Path, tables: Mapping[str, str], suffix: str = ".csv.gz") -> None:
    """Writes texts to files, compressed if the suffix says so.

    Args:
      folder: the folder; those within it are made.
      tables: the texts by the files' names without suffix, "raw/edge".
      suffix: ".csv" or ".csv.gz".
    """
    for name, text in tables.items():
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text.encode()
        path.write_bytes(gzip.compress(content, mtime=0) if suffix == ".csv.gz" else content)
