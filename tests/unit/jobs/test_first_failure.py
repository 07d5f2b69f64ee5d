"""Among several ranks that end, the one that failed first is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.first_failure import failed_node, first_failure
from slurm.records import AttemptFolder, FirstFailure

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer."
# As srun 22.05 has said them.
KILLED_FIRST = """\
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=1.0
"""
SURVIVOR_FIRST = """\
srun: error: n1: task 0: Exited with exit code 1
srun: error: n2: task 1: Out Of Memory
"""
RAISED_FIRST = """\
srun: error: n2: tasks 2-3: Exited with exit code 4
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n1: tasks 0-1: Killed
"""
NODE_LOST = """\
srun: error: Node failure on n2
slurmstepd-n1: error: *** STEP 11.0 ON n1 CANCELLED AT 2026-11-24T00:31:41 DUE TO NODE FAILURE ***
srun: error: n1: task 0: Terminated
"""


@pytest.mark.parametrize(
    ("failure", "last_words", "srun", "expected"),
    [
        # The survivor recorded that it lost its peer, which could not record anything.
        (FirstFailure(0, "n1", 1), RESET, KILLED_FIRST, "rank 1 on n2 was killed (srun: Killed)"),
        # NCCL's and the store's words of the same.
        *(
            (FirstFailure(0, "n1", 1), words, SURVIVOR_FIRST, "rank 1 on n2 was killed")
            for words in (
                "socketProgress: Connection closed by remote peer n2<35452>",
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
                "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
            )
        ),
        # Also where its words are of another kind.
        (FirstFailure(0, "n1", 1), "ValueError: 3", KILLED_FIRST, "rank 1 on n2 was killed (srun: Killed)"),
        (None, "", KILLED_FIRST.replace("Killed", "Out Of Memory"), "rank 1 on n2 was killed (srun: Out Of Memory)"),
        (
            None,
            "",
            "srun: error: n3: task 5: Segmentation fault (core dumped)\n",
            "rank 5 on n3 was killed (srun: Segmentation fault (core dumped))",
        ),
        # Under a container's shell, say: it gives the signal as a code.
        (
            FirstFailure(0, "n1", 1),
            RESET,
            "srun: error: n2: task 1: Exited with exit code 137\n",
            "rank 1 on n2 ended with",
        ),
        # srun ends the others when the first one is gone.
        (FirstFailure(2, "n2", 4), "no space", RAISED_FIRST, "rank 2 on n2 ended with exit code 4: no space"),
        # NCCL's watchdog aborts ranks whose peer is the cause.
        (
            FirstFailure(1, "n2", 1),
            "ValueError: 3",
            "srun: error: n1: task 0: Aborted\n",
            "rank 1 on n2 ended with exit code 1: ",
        ),
        (
            FirstFailure(0, "n1", 1),
            RESET,
            "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Terminated\n",
            "rank 0 on n1 lost its connection to a rank that left no word",
        ),
        (None, "", "srun: error: n2: task 1: Exited with exit code 75\n", "rank 1 on n2 ended with exit code 75"),
    ],
)
def test_the_first_failure_is_named(
    tmp_path: Path, failure: FirstFailure | None, last_words: str, srun: str, expected: str
) -> None:
    folder = AttemptFolder(tmp_path)
    (tmp_path / "srun.log").write_text(srun)
    if failure is not None:
        folder.tell_failure(failure)
        folder.log_of(failure.rank).write_text(f"step 5\n{last_words}\n")
    found = first_failure(folder)
    assert found is not None
    assert found[1].startswith(expected)
    assert failed_node(folder) is None


def test_a_node_that_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "srun.log").write_text(NODE_LOST)
    assert failed_node(AttemptFolder(tmp_path)) == "n2"


def test_what_srun_says_of_itself_is_no_failure_of_a_rank(tmp_path: Path) -> None:
    assert first_failure(AttemptFolder(tmp_path)) is None
    (tmp_path / "srun.log").write_text("srun: error: Unable to create step for job 7: Requested node is busy\n")
    assert first_failure(AttemptFolder(tmp_path)) is None
