"""Sealed safetensors files, taken apart and put together again with the right sums, as who can write may do."""

import hashlib
import json
from pathlib import Path
from typing import Any


def taken_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns a file's header and the bytes of its arrays."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def put_together(path: Path, header: dict[str, Any], body: bytes) -> None:
    """Writes a file of a header and of bytes, with the sums that they have."""
    metadata = dict(header["__metadata__"])
    metadata.pop("sha256", None)
    sums = json.loads(metadata["sha256_of_arrays"])
    for name, entry in header.items():
        if name in sums:
            begin, end = entry["data_offsets"]
            sums[name] = hashlib.sha256(body[begin:end]).hexdigest()
    metadata["sha256_of_arrays"] = json.dumps(sums)
    header = {**header, "__metadata__": metadata}
    metadata["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(path: Path, name: str) -> Any:
    """Returns the JSON data in an entry of a file's metadata."""
    return json.loads(taken_apart(path)[0]["__metadata__"][name])


def forge(path: Path, name: str, text: str) -> None:
    """Replaces an entry of a file's metadata, whose sums are right again."""
    header, body = taken_apart(path)
    header["__metadata__"][name] = text
    put_together(path, header, body)
