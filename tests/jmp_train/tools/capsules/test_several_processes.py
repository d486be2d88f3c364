"""Each of several processes writes its own part of a capsule; they replay it together, and one alone has all of it."""

from pathlib import Path

import numpy as np
import pytest
from process_helpers import launched
from process_programs import batch_of_capsules, make_step

import jmp_train as jt

pytestmark = pytest.mark.full

PROGRAMS = Path(__file__).resolve().parents[3] / "programs" / "process_programs.py"


@pytest.mark.timeout(240)
def test_two_processes_replay_their_skips(tmp_path: Path) -> None:
    code, text = launched(PROGRAMS, "capsules", tmp_path, options=["--devices-per-process", "2"])
    assert code == 0, text
    for route in ("shard_map False", "jit False", "jit True", "pmap False"):
        assert text.count(f"{route}: replayed 3") == 2, text

    _, state = make_step("mixed_float16")
    folder = tmp_path / "shard_map_False"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step_{step:08d}.process_{process}_of_2.capsule" for step in (0, 1, 3) for process in (0, 1)
    ]
    before, batch = jt.load_capsule(folder / "step_00000000.capsule", state)
    assert int(before.step) == 0
    for name, wanted in batch_of_capsules(0, bad=True).items():
        assert np.asarray(batch[name]).tobytes() == wanted.tobytes()
    before, _ = jt.load_capsule(tmp_path / "jit_True" / "step_00000003.process_1_of_2.capsule", state)
    with pytest.raises(ValueError, match=r"params.* is of step 3|is of step 3 .*params"):
        jt.load_capsule(folder / "step_00000003.capsule", state)
    jt.load_capsule(folder / "step_00000003.capsule", before)  # by another route, but the same parameters
    with pytest.raises(ValueError, match=r"batch \['x'\]: each of 2 processes had a different one"):
        jt.load_capsule(tmp_path / "pmap_False" / "step_00000000.capsule", state)
    (folder / "step_00000001.process_1_of_2.capsule").unlink()
    with pytest.raises(FileNotFoundError, match=r"step_00000001\.process_1_of_2\.capsule"):
        jt.load_capsule(folder / "step_00000001.process_0_of_2.capsule", state)
