"""Lines of test files that have a planted fault."""

from pathlib import Path


def line_of(file: str, fault: str) -> tuple[str, int]:
    """Returns the name of a file and the number of its line that ends with `# fault: ` and the fault."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# fault: {fault}")]
    return Path(file).name, number
