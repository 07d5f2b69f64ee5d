"""Ranks that others have started: torchrun, or nobody who watches over them; the command as a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Command, Megamem, Start, checkpoint, steps

from tests.free_ports import free_ports
from tests.rotation import in_turn

ROOT = Path(__file__).parents[2]


def run_program(*arguments: object, timeout_s: float = 240, **environ: str) -> tuple[int, str]:
    """Exit code and output; past the timeout its whole process group is killed."""
    with subprocess.Popen(
        [str(argument) for argument in arguments],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def torchrun(num_ranks: int, *arguments: object) -> tuple[int, str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    return run_program(*launcher, "-m", "tools.cli", *arguments)


@in_turn(0)
def test_torchrun_gives_the_ranks(config_file: Path, tmp_path: Path, megamem: Megamem) -> None:
    short = ("train.num_steps=4", "train.micro_batch_size=2")
    code, output = torchrun(2, "train", config_file, *short, "--run-dir", tmp_path / "torchrun")
    assert code == 0, output
    assert output.count("2 ranks (tensor 1 x pipeline 1 x data 2)") == 1
    assert checkpoint(tmp_path / "torchrun", 4).is_dir()
    assert megamem("train", config_file, *short, "--run-dir", tmp_path / "own", "--nproc", 2).code == 0
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in steps(tmp_path / "own")]
        assert [row[key] for row in steps(tmp_path / "torchrun")] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("only_rank_1", "exit_code", "message"),
    [
        # Before the ranks have met: its data is not there. After: its GPU cannot be used.
        (("data.datasets.0.path=/nowhere",), 3, "/nowhere"),
        (("train.num_steps=9",), 2, "GPUs that cannot be used"),
    ],
    ids=["before they meet", "after they met"],
)
def test_what_one_rank_fails_at_ends_the_others(
    config_file: Path, tmp_path: Path, start: Start, only_rank_1: tuple[str, ...], exit_code: int, message: str
) -> None:
    """Ranks that nobody watches over, as srun starts them. The others would wait for ten minutes."""
    if exit_code == 2:
        needs_no_gpu()
    port = free_ports()

    def started(rank: int, *more: str) -> Command:
        gpus = "0" if rank == 1 and exit_code == 2 else ""
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} | {"CUDA_VISIBLE_DEVICES": gpus}
        words = ("train", config_file, "--run-dir", tmp_path / "run", *more)
        return start(*words, before=lambda: os.environ.update(variables))

    results = [rank.wait() for rank in (started(0), started(1, *only_rank_1))]
    outputs = [result.output for result in results]
    assert [result.code for result in results] == [exit_code, exit_code], outputs
    assert "rank 0 ends because rank 1 failed" in outputs[0]
    assert message in outputs[0]
    assert message in outputs[1]


def test_gpus_that_do_not_work_are_told_by_name(config_file: Path, tmp_path: Path) -> None:
    """Ranks are forks, which cannot use GPUs that their parent has asked for: that must not be what is said."""
    needs_no_gpu()
    train = (sys.executable, "-m", "tools.cli", "train", config_file, "--run-dir", tmp_path / "run")
    code, output = run_program(*train, CUDA_VISIBLE_DEVICES="0")
    assert code == 2, output
    assert "megamem: error: this machine has GPUs that cannot be used: " in output
    assert "--device cpu" in output


def needs_no_gpu() -> None:
    """Skip where a GPU would work that a test takes for a broken one."""
    if torch.cuda.is_available():
        pytest.skip("this machine's GPUs work")


def test_a_number_of_ranks_that_contradicts_the_launcher(config_file: Path, tmp_path: Path, megamem: Megamem) -> None:
    def as_torchrun_does() -> None:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }

    result = megamem("train", config_file, "--nproc", 2, "--run-dir", tmp_path / "run", before=as_torchrun_does)
    assert result.code == 2, result.output
    assert "--nproc is 2, but 1 ranks were started already" in result.output
