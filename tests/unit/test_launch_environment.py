"""Ranks that torchrun, Slurm or our launcher started are recognised, and contradictions name the variable."""

from __future__ import annotations

import pytest

from parallel.processes.launch import threads_per_rank
from parallel.processes.ranks import RankEnvironment, current_ranks, first_host, said_by_variables_alone
from pretrain.config.schema import ParallelConfig
from tools.common.ranks import fewest_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
MEGAMEM = {
    "MEGAMEM_RENDEZVOUS": "file:///scratch/rendezvous",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def test_torchrun() -> None:
    assert current_ranks(TORCHRUN) == RankEnvironment(3, 8, 1, "env://")


def test_torchrun_without_local_world_size_is_one_machine() -> None:
    environ = {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    assert current_ranks(environ | {"LOCAL_RANK": "7"}) == RankEnvironment(3, 8, 7, "env://")
    with pytest.raises(ValueError, match="LOCAL_RANK=8"):
        current_ranks(environ | {"LOCAL_RANK": "8"})


def test_variables_that_no_launcher_has_set_may_be_left_over() -> None:
    said = said_by_variables_alone({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "HOME": "/"})
    assert said is not None
    assert said.startswith("RANK=1 WORLD_SIZE=4 in the environment")
    assert "`unset RANK WORLD_SIZE MASTER_ADDR`" in said
    for environ in (TORCHRUN | {"TORCHELASTIC_RUN_ID": "7"}, SLURM, TORCHRUN | MEGAMEM, {}):
        assert said_by_variables_alone(environ) is None


def test_where_the_ranks_meet() -> None:
    assert RankEnvironment(1, 2, 1, "env://").address(TORCHRUN) == ("10.0.0.1", 29500)
    assert RankEnvironment(1, 2, 1, "tcp://gpu07:20123").address({}) == ("gpu07", 20123)
    assert RankEnvironment(1, 2, 1, "file:///scratch/rendezvous").address({}) is None


def test_our_launcher_wins_over_what_it_inherited() -> None:
    found = current_ranks(TORCHRUN | SLURM | MEGAMEM)
    assert found == RankEnvironment(1, 2, 1, "file:///scratch/rendezvous", are_watched=True)


def test_slurm_step() -> None:
    found = current_ranks(SLURM)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (5, 6, 1)
    assert found.init_method.startswith("tcp://gpu07:")


def test_slurm_ranks_agree_on_an_address_and_steps_differ() -> None:
    urls = [current_ranks(SLURM | {"SLURM_PROCID": str(rank)}) for rank in range(6)]
    assert len({url.init_method for url in urls if url}) == 1
    later_step = current_ranks(SLURM | {"SLURM_STEP_ID": "1"})
    assert later_step is not None
    assert urls[0] is not None
    assert later_step.init_method != urls[0].init_method


@pytest.mark.parametrize("job_id", ["0", "1", "123", "99999999"])
def test_slurm_port_is_below_the_ephemeral_range(job_id: str) -> None:
    found = current_ranks(SLURM | {"SLURM_JOB_ID": job_id})
    assert found is not None
    assert 1024 < int(found.init_method.rsplit(":", 1)[1]) < 32768


def test_slurm_honours_a_chosen_rendezvous() -> None:
    found = current_ranks(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "6000", "WORLD_SIZE": "6"})
    assert found is not None
    assert found.init_method == "tcp://head:6000"


def test_torchrun_inside_srun_is_torchrun() -> None:
    found = current_ranks(SLURM | TORCHRUN)
    assert found is not None
    assert found.init_method == "env://"


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k not in names}


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="plain shell"),
        pytest.param({"WORLD_SIZE": "1"}, id="world of one"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a,b"}, id="salloc shell"),
        pytest.param(without(SLURM, "SLURM_STEP_ID"), id="batch script"),
        pytest.param(SLURM | {"SLURM_STEP_ID": "4294967290"}, id="interactive step"),
        pytest.param(SLURM | {"SLURM_STEP_ID": "4294967291"}, id="batch step"),
        pytest.param(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, id="srun --pty bash"),
    ],
)
def test_no_ranks_were_started(environ: dict[str, str]) -> None:
    assert current_ranks(environ) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        pytest.param(TORCHRUN | {"RANK": "8"}, "RANK=8", id="rank past the world"),
        pytest.param(TORCHRUN | {"RANK": "-1"}, "RANK=-1", id="negative rank"),
        pytest.param(TORCHRUN | {"RANK": "one"}, "RANK='one'", id="rank is no number"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'", id="port is no number"),
        pytest.param(without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR", id="no address"),
        pytest.param(TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT", id="empty port"),
        pytest.param(without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE", id="no world size"),
        pytest.param(without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK", id="no local rank"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2", id="local rank past its machine"),
        pytest.param({"WORLD_SIZE": "4"}, "WORLD_SIZE='4'", id="world size alone"),
        pytest.param(SLURM | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6", id="slurm rank past the world"),
        pytest.param(SLURM | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID=-1", id="negative slurm local id"),
        pytest.param(SLURM | {"SLURM_STEP_NODELIST": "gpu[7-"}, r"gpu\[7-", id="slurm node list"),
        pytest.param(without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST", id="no slurm node list"),
        pytest.param(without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID", id="no slurm local id"),
    ],
)
def test_contradictions_name_the_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        current_ranks(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("n[1-3,5]", "n1"),
        ("n[7,9]", "n7"),
        ("n[008-011]", "n008"),
        ("rack1-n[1-2],gpu4", "rack1-n1"),
        ("gpu4,rack1-n[1-2]", "gpu4"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("n[9-10]-ib.cluster.local", "n9-ib.cluster.local"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "n[1-", "n[]", "n[a-b]", "n]1[", "a,,b"])
def test_malformed_nodelists(nodelist: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        first_host(nodelist)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({}, 1),
        ({"tensor": 2, "pipeline": 2}, 4),
        ({"memory": 8}, 8),
        ({"tensor": 2, "memory": 8}, 8),
        ({"tensor": 4, "memory": 2}, 4),
        ({"tensor": 4, "pipeline": 2, "memory": 6}, 24),
    ],
)
def test_a_layout_needs_whole_memory_groups_and_whole_replicas(layout: dict[str, int], ranks: int) -> None:
    assert fewest_ranks(ParallelConfig(**layout)) == ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(("said", "num_threads"), [("3", 3), ("0", 2), ("many", 2), ("", 2), (None, 2)])
def test_ranks_have_the_threads_that_the_user_says(
    monkeypatch: pytest.MonkeyPatch, said: str | None, num_threads: int
) -> None:
    monkeypatch.setattr("parallel.processes.launch.os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads_per_rank(4) == num_threads
