"""Plants random faults and looks whether the tests notice: `python tests/mutate.py --count 10 --seed 1`.

A fault changes one operator, constant or call of a module; with `--planted`, the faults are those of
`planted_faults.toml`. They are planted in a copy of the tracked files. Of the quick ring run the tests that ran their
line in a recording (`--record`; see `line_tests.py`), those of its folder first, up to two minutes of CPU.
`equivalent_faults.txt` lists faults that change nothing that could be seen, each with its reason; they are not planted.
"""

import argparse
import ast
import copy
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from line_tests import ROOT, Outcome, Recording, folder_of, outcome_of, preload, record

FOLDERS = ("policies", "graphs", "jmp_train/steps", "jmp_train/parallel", "jmp_train/checkpoints")
EQUIVALENT = Path(__file__).parent / "equivalent_faults.txt"
PLANTED = Path(__file__).parent / "planted_faults.toml"
LAYERS = ("policies", "graphs", "jmp_train")
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LINE_END = "\n"
_NOT_RUN = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
_SELECTS = {"where", "select", "select_tree", "cond"}  # whose last two arguments are alternatives


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of one expression.

    Attributes:
      file: from the root.
      line: of the expression.
      old: its source.
      new: what takes its place.
      start: of the expression in the file, in characters.
      planted_line: the line with the fault, which names it in `equivalent_faults.txt`; the name of a planted one.
    """

    file: str
    line: int
    old: str
    new: str
    start: int
    planted_line: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_in_one_line(self.old)}  ->  {_in_one_line(self.new)}"

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault."""
        assert text.startswith(self.old, self.start), f"{self} is not there"
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


@dataclasses.dataclass(frozen=True)
class Caught:
    """What became of a fault.

    Attributes:
      fault: what was planted.
      outcome: of the tests.
      tests: how many there were to choose from.
    """

    fault: Fault
    outcome: Outcome
    tests: int

    @property
    def where(self) -> str:
        """Which tests noticed it: those of its folder, others of the ring, or none."""
        failed = self.outcome.failed
        if failed is None:
            return "SURVIVES"
        return "ring" if "::" in failed and folder_of(failed) != folder_of(self.fault.file) else "folder"

    def __str__(self) -> str:
        by = self.outcome.failed or f"{self.tests} tests, of which {self.outcome.left_out} were left out"
        return f"{self.where:<8} {self.outcome.cpu:>4.0f} s  {self.fault}\n{'':16}{by}"


def faults_of(file: str, text: str) -> list[Fault]:
    """Returns all faults that can be planted in a module, from its first line to its last.

    Args:
      file: its path from the root.
      text: its source.
    """
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, found = text.encode(), []
    for node in _expressions(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = data[begin:end].decode()
        for changed in _changes(node):
            before, after = data[:begin].decode(), data[end:].decode()
            new = f"({ast.unparse(changed)})"  # whole wherever it stands
            line = f"{before.rpartition(LINE_END)[2]}{new}{after.partition(LINE_END)[0]}".strip()
            found.append(Fault(file, node.lineno, old, new, len(before), line))
    return found


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that run, without annotations, texts of errors, and what only type checkers read."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, _NOT_RUN):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue  # of zip: as an assert, it holds or ends the program
            if isinstance(node, ast.expr):
                yield node
            yield from _expressions(node)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    """Yields an expression with each fault that its kind can have."""
    match node:
        case ast.Compare(ops=ops):
            for i, operator in enumerate(ops):
                yield _with(node, ops=[*ops[:i], _OPERATORS[type(operator)](), *ops[i + 1 :]])
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield _with(node, op=_OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield _with(node, op=_OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Call(args=[*first, left, right]) if _name(node) in _SELECTS and first:
            yield _with(node, args=[*first, right, left])
        case ast.Call(args=[argument]) if _name(node) == "stop_gradient":
            yield argument
        case ast.Call(keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg == "axis" and (axis := _other_axis(keyword.value)):
                    yield _with(node, keywords=[*keywords[:i], ast.keyword("axis", axis), *keywords[i + 1 :]])


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _other_axis(axis: ast.expr) -> ast.expr | None:
    match axis:
        case ast.Constant(value=0):
            return ast.Constant(-1)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return ast.Constant(0)
    return None


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def equivalent_faults() -> dict[tuple[str, str], str]:
    """Returns the reasons of faults that change nothing which could be seen, by file and line with the fault."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    parts = [(*line.split(" | ", 1)[:1], *line.split(" | ", 1)[1].rsplit(" | ", 1)) for line in lines]
    return {(file, planted): reason for file, planted, reason in parts}


def drawn_faults(folders: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Returns random faults of folders, the same for the same seed and tree; those that are equivalent are left out.

    Args:
      folders: folders, from the root.
      count: how many.
      seed: of the choice.
    """
    equivalent = equivalent_faults()
    found = [fault for file in modules(folders) for fault in faults_of(file, (ROOT / file).read_text())]
    found = [fault for fault in found if (fault.file, fault.planted_line) not in equivalent]
    return random.Random(seed).sample(found, min(count, len(found)))


def planted_faults() -> list[Fault]:
    """Returns the faults of `planted_faults.toml`.

    Raises:
      ValueError: the old text of one is not in its file exactly once.
    """
    return [_planted(**fault) for fault in tomllib.loads(PLANTED.read_text())["fault"]]


def _planted(name: str, file: str, old: str, new: str) -> Fault:
    text = (ROOT / file).read_text()
    if (count := text.count(old)) != 1:
        raise ValueError(f"fault {name!r}: its old text is {count} times in {file}, not once")
    start = text.index(old)
    return Fault(file, text.count(LINE_END, 0, start) + 1, old, new, start, name)


def modules(folders: Sequence[str]) -> list[str]:
    """Returns the tracked modules of folders, from the root."""
    command = ["git", "ls-files", "--", *(f"{folder}/*.py" for folder in folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()


@contextmanager
def compiled_once() -> Iterator[None]:
    """Keeps compiled programs for all faults: what one leaves as it is need not be compiled again for the next."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies are deleted, as they are after Ctrl-C
    with tempfile.TemporaryDirectory(prefix="mutation-cache-") as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        yield


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yields a temporary copy of the tracked files as they are in the checkout, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):  # not what is deleted, and not committed yet
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield Path(folder)


def check(faults: Sequence[Fault], recording: Recording, say: Callable[[str], None] = print) -> list[Caught]:
    """Plants faults, says what became of each, and returns it.

    Args:
      faults: to be planted, one at a time.
      recording: of the quick ring, which chooses the tests.
      say: is called with a line for each fault.
    """
    found = []
    with copied_tree() as tree:
        for fault in faults:
            text = (ROOT / fault.file).read_text()
            tests = recording.tests(fault.file, text, fault.line)
            while True:
                (tree / fault.file).write_text(fault.planted(text))
                outcome = outcome_of(tree, tests, recording.costs)
                (tree / fault.file).write_text(text)
                if outcome.failed not in tests or not outcome_of(tree, [outcome.failed], recording.costs).failed:
                    break
                say(f"{outcome.failed} fails without faults, too")
                tests.remove(outcome.failed)
            found.append(Caught(fault, outcome, len(tests)))
            say(str(found[-1]))
    return found


def main() -> int:
    """Plants the faults that the command line asks for, and returns 1 if fewer than nine of ten are caught."""
    parser = argparse.ArgumentParser(description="Plants random faults and looks whether the quick tests notice.")
    parser.add_argument("--count", type=int, default=10, help="how many faults; default: 10")
    parser.add_argument("--seed", type=int, default=1, help="of the choice; default: 1")
    parser.add_argument("--folder", nargs="+", default=FOLDERS, help=f"folders; default: {' '.join(FOLDERS)}")
    parser.add_argument("--planted", action="store_true", help="plant the faults of planted_faults.toml instead")
    parser.add_argument("--record", action="store_true", help="record anew which tests run which line")
    parser.add_argument(
        "--recording", type=Path, default=ROOT / "out" / "mutate", help="its folder; default: out/mutate"
    )
    options = parser.parse_args()
    with compiled_once():
        if options.record or not (options.recording / "texts.json").exists():
            print("recording which tests run which line: the whole quick ring, once", flush=True)
            record(options.recording, modules(LAYERS))
        preload()
        faults = planted_faults() if options.planted else drawn_faults(options.folder, options.count, options.seed)
        found = check(faults, Recording(options.recording), lambda line: print(line, flush=True))
    caught = [one for one in found if one.where != "SURVIVES"]
    by_folder = sum(one.where == "folder" for one in found)
    seed = "planted faults" if options.planted else f"seed {options.seed}"
    print(f"{by_folder} of {len(found)} caught by the tests of their folder, {len(caught)} in all; {seed}")
    return int(10 * len(caught) < 9 * len(found))


if __name__ == "__main__":
    sys.exit(main())
