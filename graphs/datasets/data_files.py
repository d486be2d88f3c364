"""Finds the files of a data set in a folder, and names missing ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the first existing file of some names, or None.

    Args:
      folder: the folder.
      names: possible names of the file.
    """
    return next((folder / name for name in names if (folder / name).is_file()), None)


def find_files(
    data_dir: Path,
    names: Mapping[str, Sequence[str]],
    public: str,
    facts: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """Returns the files of a data set.

    Args:
      data_dir: the folder.
      names: by key, possible names of each file; the first that exists is taken.
      public: public address of the data set, for messages.
      facts: by key, further text about a file for messages, on its own line; None for nothing.

    Returns:
      The paths by key.

    Raises:
      FileNotFoundError: the folder does not exist, or files are missing; the message names them all.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> (folder / "edges.csv").touch()
      >>> names = {"edges": ("edges.csv.gz", "edges.csv"), "labels": ("labels.csv",)}
      >>> try:
      ...     find_files(folder, names, "they are public in https://example.org")
      ... except FileNotFoundError as fault:
      ...     print(str(fault).replace(str(folder), "data"))
      data_dir data lacks labels.csv; they are public in https://example.org
    """
    if not data_dir.is_dir():
        raise FileNotFoundError(f"data_dir {data_dir} is not a folder; {public}")
    paths = {key: find_file(data_dir, choices) for key, choices in names.items()}
    missing = {key: names[key] for key, path in paths.items() if path is None}
    if missing and facts is not None:
        lines = describe_files(missing, facts)
        raise FileNotFoundError(f"data_dir {data_dir} lacks files; {public}:{lines}")
    if missing:
        files = ", ".join(" or ".join(choices) for choices in missing.values())
        raise FileNotFoundError(f"data_dir {data_dir} lacks {files}; {public}")
    return {key: path for key, path in paths.items() if path is not None}


def describe_files(names: Mapping[str, Sequence[str]], facts: Mapping[str, str]) -> str:
    """Returns an indented line for each file, with a line break before it.

    Args:
      names: by key, possible names of each file.
      facts: by key, further text about it.
    """
    return "".join(f"\n  {' or '.join(choices)} ({facts[key]})" for key, choices in names.items())
