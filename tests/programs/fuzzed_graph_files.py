"""Reads mutated files of graphs, and judges what comes of each; run as a program, as it sets limits on itself.

    python fuzzed_graph_files.py SEED COUNT FOLDER

It prints one line of JSON: how many files were read and refused, what was wrong, the time of the slowest and
how much memory was taken. Nothing may be executed, imported or written, as an audit hook sees.
"""

import collections
import contextlib
import encodings.raw_unicode_escape
import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
import unicodedata
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from graph_file_mutations import (
    Files,
    Mutation,
    change_bytes,
    change_directory,
    change_npz,
    change_pickle,
    change_text,
    change_torch,
    change_zipped,
    link_files,
    ogb_files,
    planetoid_files,
    reddit_files,
)

from jmp_train.graphs import LinkData, NodeData, read_ogb, read_ogb_links, read_planetoid, read_reddit
from jmp_train.policies import CollapsedValuesWarning

MEMORY = 3 * 2**29  # bytes of addresses above what the imports took
SECONDS = 60  # for one file: an endless loop takes longer


# What a peer reads of a file that was accepted.


def of_planetoid(path: Path, data: NodeData) -> bool:
    """Whether the data are what the standard library reads, with the names in today's places."""
    name = path.name.removeprefix("ind.cora.")
    if name == "test.index":
        return data.test.tolist() == sorted(map(int, path.read_bytes().split()))
    places = {
        "_reconstruct": lambda kind, shape, code: np.ndarray.__new__(kind, shape, code),
        "csr_matrix": scipy.sparse.csr_matrix,
        "defaultdict": collections.defaultdict,
        "dtype": np.dtype,
        "ndarray": np.ndarray,
        "list": list,
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            return places[name]

    with path.open("rb") as file:
        value = Unpickler(file, encoding="latin1").load()
    test = [int(line) for line in path.with_name("ind.cora.test.index").read_bytes().split()]
    if name == "graph":
        pairs = {(a, b) for node, ids in value.items() for other in ids for a, b in [(node, other), (other, node)]}
        return pairs == set(zip(data.senders.tolist(), data.receivers.tolist(), strict=True))
    ids = test if name[0] == "t" else range(value.shape[0])
    if name[-1] == "y":
        return name == "y" or data.labels[ids].tolist() == value.argmax(axis=1).tolist()
    return name == "x" or np.array_equal(data.features[ids], value.toarray().astype(np.float32))


def of_ogb(path: Path, data: NodeData) -> bool:
    """Whether the data are what Python reads, one number after the other."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = io.StringIO(content.decode("latin1"), newline=None)
    table = [[float(field.strip()) for field in line.split(",")] for line in text if line.strip()]  # of \x1e too
    name, array = path.name.partition(".")[0], np.array(table)
    if not len(array):
        return name == "valid" and not len(data.validation)
    given: Mapping[str, np.ndarray] = {
        "edge": np.stack([data.senders, data.receivers], 1),
        "num-node-list": np.array([data.num_nodes]),
        "num-edge-list": np.array([data.num_edges]),
        "node-feat": data.features,
        "node-label": data.labels,
        "edge-feat": data.edges["feat"],
        "node_year": data.nodes["year"],
        "train": data.train,
        "valid": data.validation,
        "test": data.test,
    }
    got = given[name].reshape(array.shape)
    wanted = np.where(np.isnan(array), -1, array) if name == "node-label" else array
    return np.array_equal(got, wanted.astype(got.dtype))


def of_reddit(path: Path, data: NodeData) -> bool:
    """Whether the data are what numpy reads."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in ("row", "col", "feature", "label", "node_types"):
            if f"{name}.npy" in archive.namelist():
                with archive.open(f"{name}.npy") as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    if path.name == "reddit_graph.npz":
        ends = arrays["row"].tolist(), arrays["col"].tolist()
        return ends == (data.senders.tolist(), data.receivers.tolist())
    kinds = [np.flatnonzero(arrays["node_types"] == kind).tolist() for kind in (1, 2, 3)]
    return (
        np.array_equal(arrays["feature"].astype(np.float32), data.features)
        and arrays["label"].tolist() == data.labels.tolist()
        and kinds == [part.tolist() for part in (data.train, data.validation, data.test)]
    )


class TorchUnpickler(pickle.Unpickler):
    """Makes arrays only; a tensor is None."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch" or name in ("_rebuild_tensor_v2", "OrderedDict"):
            return lambda *_: None
        makers = {"_reconstruct": lambda kind, shape, code: np.ndarray.__new__(kind, shape, code)}
        return {**makers, "dtype": np.dtype, "ndarray": np.ndarray, "bytes": bytes, "encode": str.encode}[name]

    def persistent_load(self, pid: Any, /) -> None:
        return None


def of_links(path: Path, data: LinkData) -> bool:
    """Whether the arrays are what the standard library reads."""
    links = {"train": data.train, "valid": data.validation, "test": data.test}[path.stem]
    file, count = io.BytesIO(path.read_bytes()), 4
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            file, count = io.BytesIO(archive.read("train/data.pkl")), 1
    value = [TorchUnpickler(file).load() for _ in range(count)][-1]
    pairs = {"edge": (links.senders, links.receivers), "edge_neg": (links.negative_senders, links.negative_receivers)}
    return all(
        value.get(name) is None or np.stack(ends, 1).reshape(-1, 2).tolist() == value[name].tolist()
        for name, ends in pairs.items()
    )


def are_links_whole(data: LinkData) -> bool:
    """Whether the links are of nodes that are there."""
    parts = (data.train, data.validation, data.test)
    ids = [each for part in parts for each in (part.senders, part.receivers)]
    ids += [each for part in parts for each in (part.negative_senders, part.negative_receivers)]
    return all(len(part.senders) == len(part.receivers) for part in parts) and all(
        each.dtype == np.int32 and bool(((each >= 0) & (each < data.num_nodes)).all()) for each in ids
    )


def is_whole(data: NodeData | LinkData) -> bool:
    """Whether the data fit each other: a loop that trains on them reads nothing out of range."""
    if isinstance(data, LinkData):
        return are_links_whole(data)
    ids = np.concatenate([data.train, data.validation, data.test])
    ends = np.concatenate([data.senders, data.receivers])
    return (
        len(data.features) == len(data.labels) == data.num_nodes
        and data.features.dtype == np.float32
        and bool(np.isfinite(data.features).all())
        and len(data.senders) == len(data.receivers)
        and {x.dtype for x in (ids, ends, data.labels)} == {np.dtype(np.int32)}
        and bool(((ends >= 0) & (ends < data.num_nodes)).all())
        and bool(((ids >= 0) & (ids < data.num_nodes)).all())
        and len(set(ids.tolist())) == len(ids)
        and bool(((data.labels >= -1) & (data.labels < data.num_classes)).all())
        and bool((data.labels[ids] >= 0).all())
    )


# What must not happen while a file is read.

AT_NEED = (encodings.raw_unicode_escape, unicodedata)  # Python's own, to decode strings and names
FORBIDDEN = (
    "exec", "import", "marshal.", "pickle.find_class", "os.", "subprocess.", "shutil.", "socket.", "ctypes.",
    "pty.", "tempfile.", "webbrowser.", "urllib.", "builtins.input", "code.__new__", "function.__new__",
)  # fmt: skip
HARMLESS = ("os.listdir", "os.scandir")
watched: list[str] | None = None  # what happened, while somebody looks


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is None:
        return
    writes = event == "open" and (
        set(str(arguments[1])) & set("wax+") or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    )
    is_memory = event == "os.truncate" and isinstance(arguments[0], int)  # no file has a number
    if writes or (event.startswith(FORBIDDEN) and event not in HARMLESS and not is_memory):
        watched.append(f"{event}{arguments!r}"[:200])
        raise RuntimeError(watched[-1])


@contextlib.contextmanager
def watching() -> Iterator[list[str]]:
    global watched
    seen: list[str] = []
    watched = seen
    signal.alarm(SECONDS)
    try:
        yield seen
    finally:
        watched = None
        signal.alarm(0)


def judged(read: Callable[[Path], NodeData | LinkData], peer: Any, folder: Path, path: Path) -> str:
    """Returns "read", "refused", or what is wrong with what became of the file."""
    data, seen = None, []
    try:
        with watching() as seen:
            data = read(folder)
    except (ValueError, OSError) as error:
        text = str(error)
        if seen:
            return f"did {seen[0]}"
        if "\n" in text or str(folder) not in text or len(text) > 600:
            return f"is not named in one line: {text[:300]!r}"
        return "refused"
    except BaseException as error:  # noqa: BLE001  # which is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:300]
    if seen:
        return f"did {seen[0]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_right = is_whole(data) and peer(path, data)
    except MemoryError:  # the standard library makes room for as many objects as a number says
        is_right = is_whole(data)
    except Exception as error:  # noqa: BLE001  # the peer refuses the file
        return f"was read, and the peer raised {type(error).__name__}: {error}"[:300]
    return "read" if is_right else "was read wrongly"


def kinds(folder: Path) -> list[tuple[str, Any, Any, Files, list[Mutation]]]:
    """Returns of each format its name, reader, peer, right files and mutations."""
    places = {name: folder / name for name in ("planetoid", "ogb", "ogb-zipped", "links", "reddit", "reddit-zipped")}
    for place in places.values():
        place.mkdir()
    compressed = np.savez_compressed
    return [
        ("planetoid", read_planetoid, of_planetoid, planetoid_files(places["planetoid"]), [change_pickle] * 2),
        ("ogb", read_ogb, of_ogb, ogb_files(places["ogb"], ".csv"), [change_text]),
        ("ogb-zipped", read_ogb, of_ogb, ogb_files(places["ogb-zipped"], ".csv.gz"), [change_zipped] * 2),
        ("links", read_ogb_links, of_links, link_files(places["links"]), [change_torch] * 2),
        ("reddit", read_reddit, of_reddit, reddit_files(places["reddit"], np.savez), [change_npz]),
        (
            "reddit-zipped",
            read_reddit,
            of_reddit,
            reddit_files(places["reddit-zipped"], compressed),
            [change_npz, change_directory],
        ),
    ]  # fmt: skip


def campaign(seed: int, count: int, folder: Path) -> dict[str, Any]:
    """Returns the figures of reading so many mutated files."""
    draw, formats = random.Random(seed), kinds(folder)
    outcomes: dict[str, collections.Counter[str]] = {name: collections.Counter() for name, *_ in formats}
    wrong, slowest = [], (0.0, "")
    for name, read, peer, files, _ in formats:
        read(folder / name)  # imports what is imported at need
        for file in files:
            outcome = judged(read, peer, folder / name, folder / name / file)
            assert outcome == "read", (name, file, outcome)
    for number in range(count):
        name, read, peer, files, mutations = draw.choice(formats)
        file = draw.choice(list(files))
        content = files[file]
        while content == files[file]:
            content = draw.choice([change_bytes, *mutations])(draw, files[file])
        path = folder / name / file
        path.write_bytes(content)
        start = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error" if number % 2 else "ignore")
            warnings.simplefilter("ignore", CollapsedValuesWarning)  # right of numbers that became large
            outcome = judged(read, peer, folder / name, path)
        slowest = max(slowest, (time.monotonic() - start, f"file {number}, {name} {file}"))
        path.write_bytes(files[file])
        outcomes[name][outcome if outcome in ("read", "refused") else "wrong"] += 1
        if outcome not in ("read", "refused"):
            wrong.append(f"file {number}, {name} {file}: {outcome}")
            (folder / f"wrong-{number}").write_bytes(content)
    return {
        "outcomes": {name: dict(counts) for name, counts in outcomes.items()},
        "wrong": wrong,
        "slowest": slowest,
        "hacked": Path("hacked").exists(),
    }


def lack_of_memory(folder: Path) -> list[str]:
    """Returns what is said of right files that do not fit into memory."""
    said = []
    place = folder / "ogb"
    (place / "raw/node-feat.csv").write_text("0\n" * 20_000_000)
    (place / "raw/num-node-list.csv").write_text("20000000\n")
    limit_memory(2**25)
    try:
        read_ogb(place)
    except OSError as error:
        said.append(str(error).replace(f"{place}/", ""))
    return said


def limit_memory(above: int) -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + above, resource.RLIM_INFINITY))


def main() -> None:
    seed, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    os.chdir(folder)
    sys.addaudithook(audit)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(RuntimeError("takes too long")))
    limit_memory(MEMORY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = campaign(seed, count, folder)
    figures["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    figures["lack of memory"] = lack_of_memory(folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
