"""What processes print at their end: the cause, and once."""

import concurrent.futures
import io
import time

import pytest

from jmp_train.app.launch.ranks import may_be_last, refusal, say, telling

pytestmark = pytest.mark.quick

# As jax 0.10 and 0.12 print it.
ABORT = [
    "E1128 09:51:01.148531    1253 coordination_service_agent.cc:289] Polled an error from coordination service (this",
    "F1128 09:51:01.148678    1253 client.h:80] Terminating process because the JAX distributed service detected fatal",
    "Additional GRPC error information from remote target coordination_service while calling /xla.coordination.",
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}',
    "W1128 09:46:25.745592   30847 preemption_sync_manager.cc:147] Failed to retrieve preemption notice from coord",
    "*** Check failure stack trace: ***",
    "    @     0x7f8376440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
]
LOST = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: [gloo/t.cc:6] closed"]
RAISED = ["Traceback (most recent call last):", '  File "a.py", line 2, in <module>', "LookupError: no 7", "", "a note"]
SYNTAX = ['  File "a.py", line 3', "    x ="]
ERROR = ["jmp-train: error: the loss is nan"]
OTHER = ["F1128 09:51:01.148678    1253 cuda_executor.cc:80] out of memory"]


@pytest.mark.parametrize("lines", [ABORT, LOST, RAISED, SYNTAX, ERROR])
def test_the_first_line_of_an_end_is_known(lines: list[str]) -> None:
    assert may_be_last(lines[0])
    assert all(map(may_be_last, ABORT))


@pytest.mark.parametrize(
    "line",
    ["step 3  loss 0.1", "", "W1128 09:44:16.812495   29186 preemption_notifier.cc:90] SIGTERM", "a @ 0x"],
)
def test_other_lines_are_printed_at_once(line: str) -> None:
    assert not may_be_last(line)


@pytest.mark.parametrize(
    ("words", "failed", "told"),
    [
        ({0: ABORT, 1: [], 2: ABORT}, [1, 0, 2], {}),  # 1 was killed
        ({0: ABORT, 1: RAISED}, [0, 1], {1: RAISED}),  # also if the launcher first sees the end of another
        ({0: LOST, 1: [*ABORT, *RAISED]}, [0, 1], {1: RAISED}),
        ({0: RAISED, 1: [*RAISED, *ABORT], 2: ERROR}, [1, 0, 2], {1: RAISED, 2: ERROR}),
        ({0: LOST, 1: ABORT, 2: []}, [1, 0], {1: ABORT}),  # the network failed: 2 was stopped by the launcher
        ({0: OTHER, 1: LOST}, [1, 0], {0: OTHER}),
        ({0: [], 1: RAISED}, [], {1: RAISED}),  # all ended well, or the launcher got a signal
        ({0: [], 1: LOST}, [], {}),
    ],
)
def test_causes_are_told_once(words: dict[int, list[str]], failed: list[int], told: dict[int, list[str]]) -> None:
    assert telling(words, failed) == told


def test_a_refusal_is_one_line_of_the_command() -> None:
    assert refusal({1: ERROR}) == "the loss is nan"
    assert [refusal(told) for told in ({}, {0: RAISED}, {0: ERROR, 1: RAISED}, {0: ERROR * 2})] == [None] * 4


def test_lines_of_several_threads_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.StringIO):
        def write(self, text: str, /) -> int:
            time.sleep(0.001)
            return super().write(text)

    monkeypatch.setattr("sys.stderr", stream := Slow())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(say, "abcd"))
    assert sorted(stream.getvalue().splitlines()) == [f"jmp-train: {text}" for text in "abcd"]
