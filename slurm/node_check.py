"""Before a run trains: does every node have what its ranks need, and do all ranks reach each other?

Every rank reports; rank 0 judges, names the bad nodes in the attempt's folder, and tells the others. Whoever is not heard
of in time is bad too. The ranks then measure an all-reduce. A slow one is told, and blamed on nobody: one bandwidth over
all ranks does not say whose link is slow.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.machine.devices import gpu_of, num_visible_gpus
from parallel.processes.ranks import RankEnvironment
from slurm.profile import ClusterConfig, NodeCheckConfig
from slurm.rendezvous import MeetingPoint
from slurm.snapshot import code_hash

_REPEATS = 3
# How long rank 0, which keeps the store, waits for the others to have heard.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Report:
    """Findings of a rank on its node.

    Attributes:
        node, rank: names of the one who reports.
        num_gpus: GPUs that the rank sees.
        gpu_problem: reason why the rank cannot use its own GPU; empty if it can, or needs none.
        free_gpu_share: free share of its GPU's memory; 1 without one.
        code: hash of the code that it runs; empty for all ranks but the first of a node, as are the next.
        folder_problem: reason why it cannot write where the run writes; empty if it can.
    """

    node: str
    rank: int
    num_gpus: int
    gpu_problem: str
    free_gpu_share: float
    code: str
    folder_problem: str


@dataclass(frozen=True)
class Expected:
    """Expectations of every rank.

    Attributes:
        num_gpus: GPUs that a rank sees; 0 where ranks use CPUs.
        code: hash of the code that was submitted.
    """

    num_gpus: int
    code: str


def judge(
    reports: Sequence[Report],
    clock_offsets_s: Mapping[int, float],
    nodes: Sequence[str],
    num_ranks: int,
    expected: Expected,
    rules: NodeCheckConfig,
) -> dict[str, str]:
    """The bad nodes, each with the reason.

    Args:
        reports: reports of the ranks that were heard of.
        clock_offsets_s: each rank's clock minus that of rank 0, by rank; only of ranks that answered.
        nodes: nodes on which ranks were to start.
        num_ranks: ranks that were to start.
    """
    bad: dict[str, list[str]] = {}
    for report in reports:
        for problem in _problems(report, clock_offsets_s, expected, rules):
            bad.setdefault(report.node, []).append(problem)
    if len(reports) < num_ranks:
        per_node = num_ranks // len(nodes)
        for node in nodes:
            heard = sum(report.node == node for report in reports)
            if heard < per_node:
                missing = f"{per_node - heard} of {per_node} ranks were not heard of within {rules.timeout_s:g} s"
                bad.setdefault(node, []).append(missing)
    return {node: ", ".join(dict.fromkeys(problems)) for node, problems in bad.items()}


def _problems(
    report: Report, clock_offsets_s: Mapping[int, float], expected: Expected, rules: NodeCheckConfig
) -> list[str]:
    problems = []
    if expected.num_gpus and report.num_gpus != expected.num_gpus:
        problems.append(f"a rank sees {report.num_gpus} GPUs of {expected.num_gpus}")
    if report.gpu_problem:
        problems.append(report.gpu_problem)
    if report.free_gpu_share < rules.min_free_gpu_share:
        problems.append(f"only {report.free_gpu_share:.0%} of a GPU's memory is free: somebody else uses it")
    if report.code and report.code != expected.code:
        problems.append(f"its code is {report.code}, and {expected.code} was submitted")
    if report.folder_problem:
        problems.append(report.folder_problem)
    offset_s = clock_offsets_s.get(report.rank, 0.0)
    if abs(offset_s) > rules.max_clock_skew_s:
        problems.append(f"its clock is {offset_s:+.1f} s off")
    return problems


def look_around(ranks: RankEnvironment, node: str, folder: Path, *, needs_gpu: bool) -> Report:
    """Report what this rank finds. Starts CUDA where it needs a GPU."""
    num_gpus = num_visible_gpus()
    problem, free_share = "", 1.0
    if needs_gpu:
        try:
            free, total = torch.cuda.mem_get_info(gpu_of(ranks.local_rank, num_gpus))
            free_share = free / total
        except (RuntimeError, ValueError, AssertionError) as error:
            problem = f"a GPU cannot be used ({str(error).splitlines()[0]})"
    first_here = ranks.local_rank == 0
    return Report(
        node=node,
        rank=ranks.rank,
        num_gpus=num_gpus,
        gpu_problem=problem,
        free_gpu_share=free_share,
        code=code_hash() if first_here else "",
        folder_problem=_why_not_writable(folder) if first_here else "",
    )


def _why_not_writable(folder: Path) -> str:
    probe = folder / f".probe.{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return ""


def check_nodes(
    ranks: RankEnvironment, at: MeetingPoint, nodes: Sequence[str], folder: Path, profile: ClusterConfig, code: str
) -> dict[str, str]:
    """Check all nodes. Collective.

    Args:
        at: meeting point of the ranks.
        nodes: nodes on which ranks were started.
        folder: a folder that all of them must be able to write in.
        code: hash of the code that was submitted.

    Returns:
        The bad nodes, each with the reason; on every rank that is still heard.
    """
    rules = profile.check
    assert rules is not None
    store = dist.TCPStore(
        at.host,
        at.check_port,
        ranks.world_size,
        is_master=ranks.rank == 0,
        timeout=timedelta(seconds=2 * rules.timeout_s),
        wait_for_workers=False,
    )
    node = os.environ.get("SLURMD_NODENAME", "")
    report = look_around(ranks, node, folder, needs_gpu=profile.gpus_per_node > 0)
    store.set(f"report/{ranks.rank}", json.dumps(asdict(report)))
    if ranks.rank == 0:
        seen = profile.gpus_per_node if profile.gpu_binding == "all" else min(1, profile.gpus_per_node)
        bad = _judge_all(store, nodes, ranks.world_size, Expected(seen, code), rules)
        store.set("verdict", json.dumps(bad))
    else:
        offset_s = _clock_offset_s(store)
        store.set(f"clock/{ranks.rank}", str(offset_s))
        bad = json.loads(store.get("verdict"))
    if bad:
        _wait_until_all_heard(store, ranks)
        return bad
    rate = _all_reduce_bytes_per_s(store, ranks, rules, on_gpu=profile.gpus_per_node > 0)
    if ranks.rank == 0:
        print(
            f"{len(nodes)} nodes are good; {ranks.world_size} ranks all-reduce {rules.all_reduce_mb} MB at "
            f"{rate / 1e9:.2f} GB/s each",
            flush=True,
        )
    return {}


def _judge_all(
    store: dist.Store, nodes: Sequence[str], num_ranks: int, expected: Expected, rules: NodeCheckConfig
) -> dict[str, str]:
    """Hear everybody, hold a clock out to them, and judge: the part of rank 0."""
    give_up_s = time.monotonic() + rules.timeout_s
    reports = []
    for rank in range(num_ranks):
        if (text := _heard(store, f"report/{rank}", give_up_s)) is not None:
            reports.append(Report(**json.loads(text)))
    offsets_s: dict[int, float] = {}
    if len(reports) == num_ranks:
        # Only when everybody waits for it: who comes later would measure its own delay.
        store.set("clock", str(time.time()))
        for rank in range(1, num_ranks):
            if (text := _heard(store, f"clock/{rank}", give_up_s)) is not None:
                offsets_s[rank] = float(text)
    else:
        store.set("clock", "nan")
    return judge(reports, offsets_s, nodes, num_ranks, expected, rules)


def _heard(store: dist.Store, key: str, give_up_s: float) -> str | None:
    """Message under a key of the store; None if it did not come in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.01, give_up_s - time.monotonic())))
    except RuntimeError:
        return None
    return store.get(key).decode()


def _clock_offset_s(store: dist.Store) -> float:
    """This clock minus that of rank 0, within the time of a message."""
    theirs = float(store.get("clock"))
    return time.time() - theirs


def _wait_until_all_heard(store: dist.Store, ranks: RankEnvironment) -> None:
    """Rank 0 keeps the store, and leaves last."""
    num_heard = store.add("heard", 1)
    give_up_s = time.monotonic() + _PATIENCE_S
    while ranks.rank == 0 and num_heard < ranks.world_size and time.monotonic() < give_up_s:
        time.sleep(0.05)
        num_heard = store.add("heard", 0)


def _all_reduce_bytes_per_s(
    store: dist.Store, ranks: RankEnvironment, rules: NodeCheckConfig, *, on_gpu: bool
) -> float:
    """Bytes that each rank sends per second in an all-reduce over all of them: 2 (n - 1) / n of what it holds."""
    device = torch.device("cuda", gpu_of(ranks.local_rank, num_visible_gpus())) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("all-reduce", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=rules.timeout_s),
    )
    held = torch.ones(rules.all_reduce_mb * 10**6 // 4, device=device)
    dist.all_reduce(held)
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(held)
    _wait_for(device)
    elapsed_s = time.perf_counter() - started
    dist.barrier()
    dist.destroy_process_group()
    sent = 2 * (ranks.world_size - 1) / ranks.world_size * held.numel() * held.element_size()
    return _REPEATS * sent / elapsed_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
