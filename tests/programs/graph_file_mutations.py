"""Small files of graphs, right ones and mutations of them, for `fuzzed_graph_files.py`."""

import gzip
import io
import pickletools
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse
from planetoid_files import write_planetoid
from table_files import write_tables
from torch_file_bytes import in_a_row, with_tensors, zipped

Files = dict[str, bytes]
Mutation = Callable[[random.Random, bytes], bytes]


# Files that are right.


def planetoid_files(folder: Path) -> Files:
    generator = np.random.default_rng(0)
    features = generator.integers(0, 3, (40, 7)) * 0.5
    neighbors = {node: generator.integers(0, 40, node % 5).tolist() for node in range(40)}
    test = [int(node) for node in generator.permutation(np.arange(28, 39))]
    write_planetoid(folder, features, np.arange(40) % 4, neighbors, 8, test)
    return contents(folder)


def ogb_files(folder: Path, suffix: str) -> Files:
    generator = np.random.default_rng(1)
    files = {
        "raw/edge": lines(generator.integers(0, 30, (50, 2))),
        "raw/num-node-list": "30\n",
        "raw/num-edge-list": "50\n",
        "raw/node-feat": lines(generator.normal(size=(30, 4)).round(4)),
        "raw/node-label": "".join(f"{n % 5 if n % 7 else 'nan'}\n" for n in range(1, 31)),
        "raw/edge-feat": lines(generator.integers(0, 9, (50, 3))),
        "raw/node_year": lines(generator.integers(1990, 2020, (30, 1))),
        "split/time/train": "0\n1\n2\n10\n",
        "split/time/valid": "3\n4\n",
        "split/time/test": "7\n8\n",
    }
    write_tables(folder, files, suffix)
    return contents(folder)


def link_files(folder: Path) -> Files:
    """Writes links in both of torch's formats, and as tensors; returns these files, and not the tables."""
    generator = np.random.default_rng(3)
    tables = {"edge": lines(generator.integers(0, 9, (20, 2))), "num-node-list": "9\n", "num-edge-list": "20\n"}
    (folder / "raw").mkdir()
    for name, text in tables.items():
        (folder / f"raw/{name}.csv").write_text(text)
    (folder / "split/time").mkdir(parents=True)
    for part, made in (("train", zipped), ("valid", in_a_row), ("test", with_tensors)):
        arrays = {"edge": generator.integers(0, 9, (5, 2)), "edge_neg": generator.integers(0, 9, (3, 2))}
        (folder / f"split/time/{part}.pt").write_bytes(made(arrays))
    return {name: content for name, content in contents(folder).items() if name.endswith(".pt")}


def lines(table: np.ndarray) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in table.tolist())


def reddit_files(folder: Path, save: Callable[..., None]) -> Files:
    generator = np.random.default_rng(2)
    ends = generator.integers(0, 6, (2, 12)).astype(np.int32)
    graph = scipy.sparse.coo_matrix((np.ones(12), tuple(ends)), shape=(6, 6))
    scipy.sparse.save_npz(folder / "reddit_graph.npz", graph, compressed=save is not np.savez)
    features = generator.normal(size=(6, 602)).astype(np.float32)
    types = np.array([1, 3, 2, 1, 3, 2])
    save(folder / "reddit_data.npz", feature=features, label=np.arange(6) * 8, node_types=types)
    return contents(folder)


def contents(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Mutations of bytes.

EXTREMES = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def flip_bits(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def set_bytes(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def append(draw: random.Random, content: bytes) -> bytes:
    return content + draw.choice([b"\0" * 99, draw.randbytes(20), content, b"\n" * 9])


def move_span(draw: random.Random, content: bytes) -> bytes:
    start, end = sorted(draw.choices(range(len(content) + 1), k=2))
    place, times = draw.randrange(len(content) + 1), draw.randrange(4)
    without = content[:start] + content[end:] if draw.random() < 0.5 else content
    return without[:place] + content[start:end] * times + without[place:]


def set_number(draw: random.Random, content: bytes) -> bytes:
    size = draw.choice([1, 2, 4, 8])
    number = draw.choice(EXTREMES) % 2 ** (8 * size)
    place = draw.randrange(max(len(content) - size, 0) + 1)
    return content[:place] + number.to_bytes(size, "little") + content[place + size :]


def other_start(draw: random.Random, content: bytes) -> bytes:
    start = draw.choice([b"\x1f\x8b\x08\0", b"PK\x03\x04", b"\x93NUMPY\x01\0", b"\x80\x04", b"\xef\xbb\xbf"])
    return start + content[draw.choice([0, len(start)]) :]


BYTES: tuple[Mutation, ...] = (
    flip_bits, flip_bits, set_bytes, set_bytes, truncate, append, move_span, set_number, set_number, other_start,
)  # fmt: skip


def change_bytes(draw: random.Random, content: bytes) -> bytes:
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        content = draw.choice(BYTES)(draw, content or b"\0")
    return content


# Mutations of tables.

FIELDS = [
    "-1", "2147483647", "2147483648", "99999999999999999999", "1e400", "1e39", "-0", "nan", "inf", "-inf", "",
    " 1 ", "1.5", "0x1", "1_0", "1" * 5000, "\x00", "\xff", '"1"', "#", "1e-400", "+3", "True", ",", "\r", "\n",
]  # fmt: skip


def change_text(draw: random.Random, content: bytes) -> bytes:
    rows = content.decode("latin1").split("\n")
    place = draw.randrange(len(rows))
    kind = draw.randrange(6)
    if kind < 3:
        fields = rows[place].split(",")
        fields[draw.randrange(len(fields))] = draw.choice(FIELDS)
        rows[place] = ",".join(fields)
    elif kind == 3:
        rows[place:place] = [draw.choice(rows)] * draw.choice([1, 2, 1000])
    elif kind == 4:
        del rows[place]
    else:
        rows[place] = draw.choice(["", " ", rows[place] * 2, "," * 9, "\t", rows[place] + "\r"])
    return "\n".join(rows).encode("latin1")


def zip_again(draw: random.Random, text: bytes) -> bytes:
    kind = draw.randrange(12)
    if kind == 0:  # a bomb: a row, an only line, blank lines, zeros
        text = draw.choice([text, b"0,", b"\n", b"\0", b"1"]) * (2**24 // max(len(text), 1))
    content = gzip.compress(text, draw.choice([0, 1, 9]), mtime=0)
    if kind == 1:
        place = draw.randrange(len(text) + 1)
        content = gzip.compress(text[:place]) + b"\0" * draw.choice([0, 0, 512]) + gzip.compress(text[place:])
    if kind == 2:
        content = content[:-8] + draw.randbytes(8)
    if kind == 3:
        content += draw.choice([b"\0" * 40, draw.randbytes(30), content[:9]])
    return content


def change_zipped(draw: random.Random, content: bytes) -> bytes:
    text = gzip.decompress(content)
    return zip_again(draw, draw.choice([change_text, change_text, change_bytes, same])(draw, text))


def same(_: random.Random, content: bytes) -> bytes:
    return content


# Mutations of npz files.

HEADERS = [
    (b"'shape': (", b"'shape': (9" + b"9" * 12), (b"'shape': (", b"'shape': (1, "), (b"<", b">"),
    (b"'shape': (", b"'shape': (-"), (b"<f4", b"|O"), (b"<i4", b"|O"), (b"<i4", b"<M8"), (b"<f4", b"<f2"),
    (b"<i8", b"<u8"), (b"<f4", b"|V2147483647"), (b"<i4", b"<U99999999"), (b"False", b"True"), (b"<i8", b"<c16"),
    (b"'shape'", b"'share'"), (b"{", b"{" * 300), (b"(", b"(" * 400), (b"False", b"-" * 9000 + b"1"),
    (b"'descr': '<f4'", b"'descr': [('a', '<f4'), ('b', 'O')]"), (b"False", b"__import__('os').system('x')"),
    (b"}", b"\\\n}"), (b"\x01\0", b"\x02\0"), (b"\x01\0", b"\x03\0"), (b"6,", b"6L,"), (b"12,", b"1" * 5000 + b","),
]  # fmt: skip


def change_npy(draw: random.Random, content: bytes) -> bytes:
    if draw.random() < 0.3:
        return change_bytes(draw, content)
    wanted, given = draw.choice(HEADERS)
    head, length = content[:10], struct.unpack("<H", content[8:10])[0]
    text, rest = content[10 : 10 + length], content[10 + length :]
    if wanted in head:
        return head.replace(wanted, given, 1) + text + rest
    text = text.replace(wanted, given, 1)
    return head[:8] + struct.pack("<H", len(text) % 2**16) + text + rest


def change_npz(draw: random.Random, content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    place = draw.randrange(len(members))
    name, array = members[place]
    kind, ways = draw.randrange(10), [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]
    if kind < 6:
        members[place] = name, change_npy(draw, array)
    elif kind == 6:
        del members[place]
    elif kind == 7:
        members.append((draw.choice([name, "row.npy\n", "x" * 999 + ".npy", name[:-4], "../" + name]), array))
    elif kind == 8:
        members[place] = name, array + b"\0" * draw.choice([1, 2**22, 2**24])
    else:
        ways = [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice(ways)) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name twice
        for name, array in members:
            archive.writestr(zipfile.ZipInfo(name), array, draw.choice(ways))
    return change_directory(draw, made.getvalue()) if draw.random() < 0.3 else made.getvalue()


def change_directory(draw: random.Random, content: bytes) -> bytes:
    """Sets a number of the directory of a zip file: of sizes, places, flags, ways to compress."""
    begin = content.find(b"PK\x01\x02")
    start = content[:begin]
    return start + set_number(draw, content[begin:])


# Mutations of pickles.

PAYLOADS = [
    b"cposix\nsystem\nU\x0ctouch hacked\x85R", b"cos\nsystem\n(U\x0ctouch hackedtR", b"(U\x0ctouch hackedios\nsystem\n",
    b"(cos\nsystem\nU\x0ctouch hackedo", b"c__builtin__\neval\n(U\x04exittR", b"cbuiltins\nexec\nU\x041/0\n\x85R",
    b"csubprocess\nPopen\n]U\x02lsa\x85R", b"c__builtin__\n__import__\nU\x0aantigravity\x85R", b"Pevil\n", b"U\x01xQ",
    b"\x82\x01", b"\x8c\x02os\x8c\x06system\x93U\x02ls\x85R", b"cnumpy\nload\nU\x01x\x85R", b"cnumpy\nndarray\n)\x81}b",
    b"cscipy.sparse.csr\ncsr_matrix\nN}U\x03dotK\x01s\x86b", b"cnumpy.core.multiarray\n_reconstruct\n)R",
    b"ccollections\ndefaultdict\ncos\nsystem\n\x85R", b"cnumpy\ndtype\nU\x01O\x85R", b"c__builtin__\nlist\n)R",
    b"c__builtin__\nopen\nU\x06hackedU\x01w\x86R", b"csys\nexit\n)R", b"cwebbrowser\nopen\nU\x01x\x85R",
    b"N}\x92", b"}U\x08__class__K\x01sb",
    b"\x8a\xff" + b"\xff" * 255, b"\x8b\x10\0\0\0" + b"\x7f" * 16, b"I" + b"9" * 5000 + b"\n",
    b"]" * 9000, b"T\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 7 + b"\x7f", b"r\xff\xff\xff\xff", b"S'\\q'\n", b"Vx\\ud800\n", b"F1e999\n",
    b"})q\x01" + b"h\x01h\x01\x86q\x01" * 90 + b"K\x01s",
]  # fmt: skip


def change_pickle(draw: random.Random, content: bytes) -> bytes:
    if not content.startswith(b"\x80"):
        return change_text(draw, content)
    places = [place for *_, place in pickletools.genops(content) if place is not None]
    parts = [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]
    for _ in range(draw.choice([1, 1, 2, 3])):
        place, kind = draw.randrange(1, len(parts)), draw.randrange(8)
        if kind < 3:
            parts.insert(place, draw.choice(PAYLOADS))
        elif kind == 3 and len(parts) > 2:
            del parts[draw.randrange(1, len(parts) - 1)]
        elif kind == 4:
            parts.insert(place, draw.choice(parts))
        elif kind == 5:
            other = draw.randrange(1, len(parts))
            parts[place], parts[other] = parts[other], parts[place]
        elif kind == 6:
            parts[place] = change_bytes(draw, parts[place])
        elif kind > 6:
            parts[place] = draw.choice(PAYLOADS)
    return b"".join(parts)


# Mutations of torch's files.


def change_torch(draw: random.Random, content: bytes) -> bytes:
    if not content.startswith(b"PK"):
        third = [place for place in range(len(content)) if content.startswith(b"\x80\x02", place)][3]
        place = draw.choice([0, third, third, third])
        return content[:place] + change_pickle(draw, content[place:])
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(["train/data.pkl"] * 4 + list(members))
    change = change_pickle if name.endswith("pkl") else draw.choice([change_bytes, same])
    members[draw.choice([name, name, name, "train/data/9", "other/data.pkl"])] = change(draw, members[name])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED])) as archive:
        for name, part in members.items():
            archive.writestr(name, part)
    return change_directory(draw, made.getvalue()) if draw.random() < 0.2 else made.getvalue()
