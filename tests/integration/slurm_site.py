"""A place to submit runs from, on the tests' cluster: the fixtures `cluster` and `site` (conftest.py)."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from commands import Megamem, Result, last_step
from slurm_cluster import Cluster

from pretrain.run.folder import RunFolder
from slurm.policy import Cause, Ended
from slurm.records import AttemptFolder, JobsFolder

# Reached only when something hangs.
_DEADLINE_S = 240.0

ENVIRONMENT = [
    {"name": "CUDA_VISIBLE_DEVICES", "value": "", "reason": "these runs are of CPUs"},
    {"name": "TORCHDYNAMO_DISABLE", "value": "1", "reason": "nothing is compiled, see tests/conftest.py"},
]
"""Entries of every profile."""


def profile(shared: Sequence[Path], **changes: Any) -> dict[str, Any]:
    """Profile of the tests' cluster."""
    return {
        "ranks_per_node": 2,
        "nodes": 2,
        "shared_paths": [*map(str, shared), sys.prefix],
        "runs_path": str(shared[0] / "runs"),
        "virtual_environment": sys.prefix,
        "cpu_binding": "none",
        "time": "10",
        "lead_s": 60,
        "check": None,
        "environment": ENVIRONMENT,
        **changes,
    }


class Site:
    """A place to submit from. All nodes see what is in its `folder`."""

    def __init__(self, cluster: Cluster, megamem: Megamem, config_file: Path, folder: Path) -> None:
        self.cluster, self.config_file, self._megamem, self.folder = cluster, config_file, megamem, folder
        self.run = folder / "runs" / "tiny"
        self.jobs = JobsFolder(RunFolder(self.run))
        self._corpus = Path(yaml.safe_load(config_file.read_text())["data"]["datasets"][0]["path"])

    def command(self, *args: object) -> Result:
        return self._megamem(*args, before=lambda: os.environ.update(self.cluster.environment))

    def submit(self, *arguments: str, config: Path | None = None, expect: int = 0, **changes: Any) -> str:
        """Submits the tiny run, or another one; `changes` are of the profile. Returns what was said."""
        path = self.folder / "here.yaml"
        path.write_text(yaml.safe_dump(profile([self.folder, self._corpus], **changes)))
        result = self.command("submit", config or self.config_file, "--cluster", path, *arguments)
        assert result.code == expect, result.output
        return result.output

    def with_an_srun_that_fails_once(self) -> list[dict[str, str]]:
        """`environment` of a profile: the first srun fails, as it does where the controller does not answer in time."""
        srun, failed = self.folder / "bin" / "srun", shlex.quote(str(self.folder / "failed"))
        srun.parent.mkdir()
        srun.write_text(
            f"#!/bin/bash\nif [[ ! -e {failed} ]]; then touch {failed}; echo 'srun: error: it is busy' >&2; exit 1; fi\n"
            f'exec {shutil.which("srun")} "$@"\n'
        )
        srun.chmod(0o755)
        path = f"{srun.parent}:{os.environ['PATH']}"
        return [*ENVIRONMENT, {"name": "PATH", "value": path, "reason": "an srun that fails once"}]

    @property
    def job(self) -> str:
        return self.jobs.job_ids()[-1]

    def wait_for_state(self, *states: str) -> dict[str, str]:
        """Wait until the newest job is in one of them."""
        self.wait_until(lambda: self.cluster.job(self.job)["JobState"] in states, f"job in {states}")
        return self.cluster.job(self.job)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: last_step(self.run) >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Fails with all that was said."""
        try:
            self.cluster.wait_until(condition, what, _DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def attempts(self, jobs: JobsFolder | None = None) -> list[AttemptFolder]:
        """Attempts that came to ranks, or still may: on a busy machine Slurm fails to start some, which is held by
        itself. `jobs`: of another run or stage."""
        folders = (jobs or self.jobs).attempt_folders()
        return [folder for folder in folders if folder.any_rank_began() or not folder.ended()]

    def wait_for_attempt(self, number: int) -> None:
        """Wait until its ranks are built and about to train: what they print first."""

        def trains() -> bool:
            folders = self.attempts()
            log = folders[number - 1].log_of(0) if len(folders) >= number else None
            return log is not None and log.exists() and "memory kernels" in log.read_text()

        self.wait_until(trains, f"attempt {number}")

    def told(self) -> str:
        """All that jobs and ranks have said."""
        logs = [*self.run.parent.glob("**/slurm/**/job_*.log"), *sorted(self.run.parent.glob("**/attempts/*/*.*"))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def ended(self, jobs: JobsFolder | None = None) -> list[Ended]:
        """Their ends, of those that have ended."""
        return [ended for folder in self.attempts(jobs) if (ended := folder.ended())]

    def causes(self, jobs: JobsFolder | None = None) -> list[Cause]:
        return [ended.cause for ended in self.ended(jobs)]
