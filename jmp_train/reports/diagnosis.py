"""The files of a diagnosis: diagnosis.html and diagnosis.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmp_train.policies import NumericsReport
from jmp_train.reports.tables import write_all


def write_diagnosis(
    directory: Path, title: str, subject: Mapping[str, Any], report: NumericsReport
) -> tuple[list[Path], list[str]]:
    """Writes diagnosis.html and diagnosis.json, each whole or not at all.

    Args:
      directory: where to; it exists.
      title: of the page.
      subject: what was diagnosed, the first entries of the JSON.
      report: the diagnosis.

    Returns:
      The paths of the files that are written, and of each other one a line with its path and why it is not.
    """
    return write_all(
        directory,
        {
            "diagnosis.html": lambda: report.to_html(title).encode(),
            "diagnosis.json": lambda: diagnosis_json(subject, report).encode(),
        },
    )


def diagnosis_json(subject: Mapping[str, Any], report: NumericsReport) -> str:
    """Returns a diagnosis as a line of JSON.

    Args:
      subject: what was diagnosed, the first entries.
      report: the diagnosis.
    """
    return json.dumps({**subject, **report.as_dict()}, allow_nan=False) + "\n"
