"""Plants random faults and looks whether the tests notice: `python tests/mutate.py --count 10 --seed 1`.

A fault changes one operator, constant or call of a module. The tests of the module run first, then those of its room,
and for faults that survive these the whole quick ring. `equivalent_faults.txt` lists faults that change nothing that
could be seen, each with its reason; they are not planted.
"""

import argparse
import ast
import copy
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mutations import RINGS, ROOT, compiled_once, copied_tree, pytest_call

ROOMS = ("policies", "graphs", "jmp_train/steps", "jmp_train/parallel", "jmp_train/checkpoints")
EQUIVALENT = Path(__file__).parent / "equivalent_faults.txt"
_SECONDS = {"room": 900, "ring": 2400}  # after which a fault counts as caught: it hangs the tests
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
_EXIT_CODES = {0: False, 1: True, 2: True, 5: False}  # passed, failed, not collected, nothing selected; of pytest
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
    """

    file: str
    line: int
    old: str
    new: str
    start: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_in_one_line(self.old)}  ->  {_in_one_line(self.new)}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the fault in `equivalent_faults.txt`; lines may move."""
        return self.file, _in_one_line(self.old), _in_one_line(self.new)

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault."""
        assert text.startswith(self.old, self.start), f"{self} is not there"
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


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
            # Parentheses keep the expression whole wherever it stands.
            found.append(Fault(file, node.lineno, old, f"({ast.unparse(changed)})", len(data[:begin].decode())))
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


def equivalent_faults() -> dict[tuple[str, str, str], str]:
    """Returns the reason of each fault that changes nothing which could be seen, by `Fault.key`."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    parts = [line.split(" | ") for line in lines]
    return {(file, old, new): reason for file, old, new, reason in parts}


def drawn_faults(rooms: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Returns random faults of rooms, the same for the same seed and tree; those that are equivalent are left out.

    Args:
      rooms: folders, from the root.
      count: how many.
      seed: of the choice.
    """
    command = ["git", "ls-files", "--", *(f"{room}/*.py" for room in rooms)]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()
    equivalent = equivalent_faults()
    found = [fault for file in files for fault in faults_of(file, (ROOT / file).read_text())]
    found = [fault for fault in found if fault.key not in equivalent]
    return random.Random(seed).sample(found, min(count, len(found)))


def stages_of(file: str) -> list[list[str]]:
    """Returns the tests of a module, and those of its room.

    Args:
      file: the module's path from the root, such as "policies/optimizers/kahan.py".

    Returns:
      Arguments of pytest by stage: the module's doctests with the tests that mirror it, then all of the room.
    """
    path = Path(file)
    mirror = Path("tests", *path.parts[:-1], f"test_{path.name}")
    room = Path("tests", *path.parts[:-1][:2])
    stages = [[file, *([str(mirror)] if (ROOT / mirror).exists() else [])]]
    return [*stages, [str(room)]] if (ROOT / room).exists() else stages


def is_caught(tree: Path, arguments: Sequence[str], seconds: float) -> bool:
    """Returns whether a test of the quick ring fails, or hangs, in a copy of the tree.

    Args:
      tree: the copy.
      arguments: of pytest.
      seconds: after which the tests count as hanging.
    """
    call = pytest_call(tree, "-x", "-m", RINGS["quick"], *arguments)
    process = subprocess.Popen(**call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code not in _EXIT_CODES:
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {code}")
    return _EXIT_CODES[code]


def check(faults: Sequence[Fault], room_only: bool, say: Callable[[str], None] = print) -> tuple[int, list[Fault]]:
    """Plants faults, says what became of each, and returns how many the rooms' own tests caught, and all that survived.

    Args:
      faults: to be planted, one at a time.
      room_only: whether the whole quick ring is left out.
      say: is called with a line for each fault.
    """
    by_room, survivors = 0, []
    with copied_tree() as tree:
        for fault in faults:
            text, begin = (ROOT / fault.file).read_text(), time.monotonic()
            (tree / fault.file).write_text(fault.planted(text))
            try:
                caught = any(is_caught(tree, stage, _SECONDS["room"]) for stage in stages_of(fault.file))
                where = "room" if caught else "SURVIVES"
                by_room += caught
                if not (caught or room_only) and is_caught(tree, ["-n", "2", "--dist", "loadfile"], _SECONDS["ring"]):
                    where, caught = "ring", True
            finally:
                (tree / fault.file).write_text(text)
            survivors += [] if caught else [fault]
            say(f"{where:<8} {time.monotonic() - begin:>5.0f} s  {fault}")
    return by_room, survivors


def main() -> int:
    """Plants the faults that the command line asks for, and returns 1 if fewer than nine of ten are caught."""
    parser = argparse.ArgumentParser(description="Plants random faults and looks whether the quick tests notice.")
    parser.add_argument("--count", type=int, default=10, help="how many faults; default: 10")
    parser.add_argument("--seed", type=int, default=1, help="of the choice; default: 1")
    parser.add_argument("--room", nargs="+", default=ROOMS, help=f"folders; default: {' '.join(ROOMS)}")
    parser.add_argument("--room-only", action="store_true", help="do not run the whole quick ring for survivors")
    options = parser.parse_args()
    faults = drawn_faults(options.room, options.count, options.seed)
    with compiled_once():
        by_room, survivors = check(faults, options.room_only, lambda line: print(line, flush=True))
    caught = len(faults) - len(survivors)
    print(f"{by_room} of {len(faults)} caught by the tests of their room, {caught} in all; seed {options.seed}")
    return int(10 * caught < 9 * len(faults))


if __name__ == "__main__":
    sys.exit(main())
