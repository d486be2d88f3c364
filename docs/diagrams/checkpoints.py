"""What a checkpoint's writer does, and what is found where it is killed."""

from parts import arrow, box, diagram, key, text

STAGES = (
    (["save(100, state)", "copies the state to the host and returns"], "", "the step before"),
    (["compute the sha256 of every leaf", "by a thread, while training goes on"], "", "the step before"),
    (["write header and arrays into a temporary file", "beside the steps"], "", "the step before"),
    (["flush the file to the disk", "compare its size"], "", "the step before"),
    (["rename to step_00000100.safetensors", "atomic"], "float32", "one of the two, whole"),
    (["flush the folder"], "", "step 100"),
    (["remove steps beyond max_to_keep"], "", "step 100"),
)
WIDE = 330


def draw() -> str:
    """Returns the picture."""
    alt = (
        "A checkpoint is written into a temporary file, flushed and renamed, and older ones are removed "
        "last. A process that is killed before the rename leaves the step before, and after it the new step."
    )
    parts, y = [], 62
    for lines, kind, found in STAGES:
        height = 14 + 19 * len(lines)
        middle = y + height / 2
        parts += [box(20, y, WIDE, lines, kind), box(440, middle - 16, 260, [found], "good")]
        parts += [arrow((20 + WIDE, middle), (440, middle))]
        if lines is not STAGES[-1][0]:
            parts += [arrow((185, y + height), (185, y + height + 24))]
        y += height + 24
    head = [
        key(20, 4, [("float32", "the moment that counts"), ("good", "what restore finds")]),
        text(20, 50, "what the writer does", "soft"),
        text(440, 50, "killed there, restore finds", "soft"),
    ]
    return diagram(720, y - 10, alt, [*head, *parts])
