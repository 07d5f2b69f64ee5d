"""A Slurm cluster of virtual nodes on this machine, with all its state in one folder. Nothing of it outlives the test.

With privileges every node has host name, process numbers and /etc/hosts of its own (`unshare`), and killing it takes
all that runs on it, at once and without a word to the controller, as a power cut would. Without, nodes share this
machine's, and its tasks are looked for by their environment.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from parallel.processes.parent_death import signal_on_parent_death
from tests.free_ports import free_ports
from tests.patience import patience

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
_NAMESPACES = (
    "unshare",
    "--uts",
    "--mount",
    "--propagation=private",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_LONGEST_SOCKET = 107
# Reached only when a daemon hangs.
_PATIENCE_S = 40.0

_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits for this many seconds and one; fewer are refused.
AuthInfo=socket={folder}/munge/socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_continue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=1
JobRequeue=1
# The default: what is told to end does so by itself, and a busy machine takes its time.
KillWait=30
SlurmdTimeout=60
SlurmctldTimeout=30
MessageTimeout=20
TCPTimeout=2
InactiveLimit=0
MinJobAge=600
PropagateResourceLimits=NONE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Programs that have to be installed first."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Cluster:
    """Started by `with`, gone after it.

    Attributes:
        environment: to be set for Slurm's commands.
    """

    def __init__(self, folder: Path, num_nodes: int, *, cpus: int = 2) -> None:
        self._folder = folder
        self._cpus = cpus
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._namespaces = _can_unshare()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._conf = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._start_munge()
            self.start_controller()
            for node in self.nodes:
                self.start_node(node)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _write_files(self) -> None:
        assert len(f"{self._folder}/n1/n1_1000000.4294967291") <= _LONGEST_SOCKET, "use a folder with a shorter name"
        for name in ("munge", "state", *self.nodes):
            (self._folder / name).mkdir()
        first_port = free_ports(len(self.nodes) + 1)
        addresses = {
            node: f"127.0.0.{10 + i}" if self._namespaces else "127.0.0.1" for i, node in enumerate(self.nodes)
        }
        lines = [
            f"NodeName={node} NodeHostname={node if self._namespaces else 'localhost'} NodeAddr={addresses[node]} "
            f"Port={first_port + 1 + i} CPUs={self._cpus} RealMemory=16000 State=UNKNOWN"
            for i, node in enumerate(self.nodes)
        ]
        self._conf.write_text(
            _CONF.format(
                host=socket.gethostname().partition(".")[0],
                port=first_port,
                user=getpass.getuser(),
                folder=self._folder,
                nodes="\n".join(lines),
            )
        )
        hosts = "".join(f"{address} {node}\n" for node, address in addresses.items())
        (self._folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        key = self._folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def _start_munge(self) -> None:
        munge = self._folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # By force: folders of tests belong to their user alone, which munged wants to be asked about.
        options = ["--foreground", "--force", *(f"--{option}={munge / name}" for option, name in files.items())]
        self._start("munged", ["munged", *options])
        self.wait_until((munge / "socket").exists, "munged to listen")

    def start_controller(self) -> None:
        self._start("slurmctld", ["slurmctld", "-D"])

    def stop_controller(self) -> None:
        """Stop the controller as for an update: jobs go on without it."""
        controller = self._daemons.pop("slurmctld")
        controller.terminate()
        controller.wait(_PATIENCE_S)

    def start_node(self, node: str) -> None:
        """Start a node, and wait until it takes jobs."""
        command = ["slurmd", "-D", "-N", node]
        if self._namespaces:
            # The shell is the node's first process: it adopts orphans, and all others die with it.
            inside = f"hostname {node} && mount --bind {self._folder}/hosts /etc/hosts || exit; slurmd -D -N {node} & wait $!"
            command = [*_NAMESPACES, "bash", "-c", inside]
        self._start(node, command)
        # Refused unless it was down.
        self._run("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until(
            lambda: node in self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split(), f"{node} to be idle"
        )

    def kill_node(self, node: str) -> None:
        """A power cut. The controller is told that it is down: by itself it would notice after a while."""
        process = self._daemons.pop(node)
        process.kill()
        process.wait()
        if not self._namespaces:
            self._kill_tasks(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def _kill_tasks(self, *nodes: str) -> None:
        """Kill what slurmd leaves behind: its step daemons, known by their folder, and tasks, by their environment."""
        for _ in range(3):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    environment = (process / "environ").read_bytes().split(b"\0")
                    names = {f"SLURMD_NODENAME={node}".encode() for node in nodes}
                    is_task = f"SLURM_CONF={self._conf}".encode() in environment and names & set(environment)
                    is_daemon = (process / "cmdline").read_bytes().startswith(b"slurmstepd") and os.readlink(
                        process / "cwd"
                    ) in {str(self._folder / node) for node in nodes}
                    if is_task or is_daemon:
                        os.kill(int(process.name), signal.SIGKILL)

    def _start(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # Also when the tests themselves are killed.
                preexec_fn=partial(signal_on_parent_death, signal.SIGKILL, os.getpid()),
                cwd=self._folder / name if name in self.nodes else self._folder,
            )

    def _environ(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return own | self.environment

    def _stop(self) -> None:
        for name in ("slurmctld", *self.nodes, "munged"):
            if (process := self._daemons.pop(name, None)) is not None:
                process.kill()
                process.wait()
        self._kill_tasks(*self.nodes)

    def run(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        result = self._run(*command)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self._environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S * patience(),
        )

    def end_all_jobs(self) -> None:
        """Whatever runs or waits, at once."""
        for options in (("--full", "--signal=KILL"), ()):
            self._run("scancel", *options, f"--user={getpass.getuser()}")
        self.wait_until(lambda: not self.run("squeue", "-h"), "all jobs to be gone")

    def job(self, job: str) -> dict[str, str]:
        """Fields that the controller knows of a job, by name."""
        return dict(
            word.split("=", 1) for word in self.run("scontrol", "-o", "show", "job", job).split() if "=" in word
        )

    def wait_until(self, condition: Callable[[], object], what: str, deadline_s: float = _PATIENCE_S) -> None:
        """Looks a few times per second; fails when a daemon has ended, or after the deadline."""
        deadline_s *= patience()
        give_up_s = time.monotonic() + deadline_s
        while not condition():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            assert not ended, f"{ended} ended: {[(self._folder / f'{name}.out').read_text() for name in ended]}"
            assert time.monotonic() < give_up_s, f"waited {deadline_s:g} s for {what}"
            time.sleep(0.1)


def _can_unshare() -> bool:
    """True if nodes can have names and processes of their own."""
    inside = ("sh", "-c", "hostname node && mount --bind /etc/hostname /etc/hosts")
    return subprocess.run([*_NAMESPACES, *inside], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
