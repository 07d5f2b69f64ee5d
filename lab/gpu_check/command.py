"""`megamem gpu-check`: do this machine's GPUs compute what a CPU does, and how fast."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.machine.devices import num_visible_gpus
from parallel.machine.refusals import check_can_write
from pretrain.config.loader import to_yaml
from pretrain.errors import ConfigError, UserError
from tools.common.metrics import read_metrics
from tools.common.parsers import add_command
from tools.common.ranks import add_device, import_engine
from tools.common.words import plural

if TYPE_CHECKING:
    from lab.gpu_check.judge import Verdict
    from lab.gpu_check.page import Output
    from lab.gpu_check.plan import CheckPlan, Command, ShortTraining
    from lab.gpu_check.trial import Observed
    from pretrain.config.schema import RunConfig

ROOT = Path(__file__).parents[2]

_EPILOG = """\
examples:
  megamem gpu-check
  megamem gpu-check --output gpu.md --minutes 40

The first checks need a GPU alone: a training under PyTorch's CUDA sanitizer, this machine's bandwidths, seconds per
part of a step as predicted and as measured, kernels beside a copy, bits of a run that is killed and resumed. Then come
short trainings on the CPU, on one GPU and on as many as there are, which must agree; then tests and benchmarks. Checks
that need more GPUs than there are, or a missing package, are skipped. Nothing is downloaded. The page is written after
every check, so that a crash leaves what came before it; it says what to send us. Exit code: 0 if nothing differs, 1 if
something does or has failed.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `gpu-check` to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "gpu-check",
        "compare this machine's GPUs with its CPU, and time them",
        _EPILOG,
        "Train small models on this machine's GPUs and its CPU, compare, measure, and write one page about it.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-check.md"), metavar="FILE", help="the page (default: gpu-check.md)"
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, metavar="M", help="start no new check after M minutes (default: 20)"
    )
    add_device(parser)
    parser.set_defaults(func=run_gpu_check)


def run_gpu_check(args: argparse.Namespace) -> int:
    """Runs the full plan."""
    if args.minutes <= 0:
        raise ConfigError(f"--minutes is {args.minutes}: it must be above 0")
    if not num_visible_gpus() and args.device != "cpu":
        raise ConfigError(
            "this machine has no GPU, or CUDA_VISIBLE_DEVICES hides it: `megamem doctor` says what there is. To try the "
            "check itself on the CPU, add --device cpu"
        )
    check_can_write(args.output)
    from lab.gpu_check.plan import full_plan

    return Check(full_plan(), args.output, num_gpus=num_visible_gpus(), minutes=args.minutes).run()


class Check:
    """A plan on its way, and what is known so far."""

    def __init__(self, plan: CheckPlan, output: Path, *, num_gpus: int, minutes: float) -> None:
        """Prepare.

        Args:
            output: the page.
            num_gpus: GPUs of this machine; 0: one rank on the CPU stands for a GPU.
            minutes: time after which no check is started.
        """
        self._plan, self._output = plan, output
        self._num_gpus, self._deadline = max(1, num_gpus), time.monotonic() + 60 * minutes
        self._started = time.monotonic()
        self._observed: dict[str, Observed] = {}
        self._verdicts: list[Verdict] = []
        self._outputs: list[Output] = []

    def run(self) -> int:
        """All checks; the exit code."""
        import_engine()
        with tempfile.TemporaryDirectory(prefix="megamem_gpu_check_") as folder:
            checks = self._checks(Path(folder))
            for number, (name, check) in enumerate(checks.items(), 1):
                print(f"[{number}/{len(checks)}] {name}", flush=True)
                verdict = self._guarded(name, check)
                print(f"    {verdict.state}: {verdict.text}", flush=True)
                self._verdicts.append(verdict)
                self._write()
        bad = sum(verdict.state in ("differs", "failed") for verdict in self._verdicts)
        print(
            f"{plural(bad, 'check')} of {len(checks)} {'is' if bad == 1 else 'are'} not as it should be: {self._output}"
        )
        return int(bad > 0)

    def _checks(self, folder: Path) -> dict[str, Callable[[], Verdict]]:
        """All checks by name, in their order; commands share the folder."""

        def commands(of_plan: Mapping[str, Command]) -> dict[str, Callable[[], Verdict]]:
            return {title: partial(self._command, title, command, folder) for title, command in of_plan.items()}

        checks = commands(self._plan.first)
        if self._plan.resumed is not None:
            checks["killed and resumed"] = partial(self._resume, self._plan.resumed)
        checks |= {trial.name: partial(self._try, trial) for trial in self._plan.trials}
        return checks | commands(self._plan.commands)

    def _guarded(self, name: str, check: Callable[[], Verdict]) -> Verdict:
        from lab.gpu_check.judge import Verdict
        from parallel.processes.launch import RanksInterrupted

        if time.monotonic() > self._deadline:
            return Verdict(name, "skipped", "no time was left: --minutes gives more")
        try:
            return check()
        except RanksInterrupted as interruption:
            raise KeyboardInterrupt from interruption
        except (RuntimeError, OSError, subprocess.SubprocessError, UserError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return Verdict(name, "failed", " ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines))

    @property
    def _left_s(self) -> float:
        """Seconds for a process that a check starts now."""
        return max(60.0, self._deadline - time.monotonic())

    def _try(self, trial: ShortTraining) -> Verdict:
        from lab.gpu_check.judge import Verdict, judge
        from lab.gpu_check.trial import run_on_cpu, run_trial
        from parallel.processes.launch import launch_ranks

        if trial.num_ranks > self._num_gpus:
            return Verdict(trial.name, "skipped", f"needs {trial.num_ranks} GPUs")
        if trial.like is not None and trial.like not in self._observed:
            return Verdict(trial.name, "skipped", f"there is no {trial.like} to compare it with")
        work = run_on_cpu if trial.on_cpu else run_trial
        by_rank = launch_ranks(lambda: work(trial.config), trial.num_ranks)
        # Ranks agree on losses; of memory, the most counts.
        observed = self._observed[trial.name] = max(by_rank, key=lambda seen: seen.held_bytes)
        return judge(trial, observed, None if trial.like is None else self._observed[trial.like])

    def _resume(self, config: RunConfig) -> Verdict:
        """Through the front door, on text that every machine has: a run left alone, and one killed half-way."""
        from lab.gpu_check.judge import judge_resumed

        with tempfile.TemporaryDirectory(prefix="megamem_gpu_check_") as name:
            folder = Path(name)
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            megamem("data", "prepare", "python-stdlib", "--output", folder / "data", "--validation-fraction", "0.1")
            keys = (
                "model.vocab_size=null",
                f"data.datasets=[{{path: {folder / 'data'}}}]",
                f"checkpoint.every_steps={config.train.num_steps // 4}",
                "train.deterministic=true",
                "evaluation.max_sequences=8",
            )
            train = ("train", folder / "config.yaml", *keys, "--nproc", "1", "--run-dir")
            megamem(*train, folder / "straight")
            killed = subprocess.Popen(
                _words(*train, folder / "killed"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            # After the checkpoint of half of the steps, and before the end.
            num_steps, stop = config.train.num_steps // 2 + 2, time.monotonic() + self._left_s
            while killed.poll() is None and len(_losses(folder / "killed")) < num_steps and time.monotonic() < stop:
                time.sleep(0.01)
            killed.send_signal(signal.SIGKILL)
            if time.monotonic() >= stop:
                raise RuntimeError("the run that was to be killed half-way did not come there in time")
            if killed.wait() != -signal.SIGKILL:
                raise RuntimeError(f"the run that was to be killed had ended before, with {killed.returncode}")
            megamem(*train, folder / "killed")
            return judge_resumed(_losses(folder / "straight"), _losses(folder / "killed"), config.train.num_steps)

    def _command(self, title: str, command: Command, folder: Path) -> Verdict:
        from lab.gpu_check.judge import Verdict
        from lab.gpu_check.page import Output
        from lab.gpu_check.plan import FOLDER

        if command.num_gpus > self._num_gpus:
            return Verdict(title, "skipped", f"needs {command.num_gpus} GPUs")
        package = command.words[0].split(".")[0]
        if importlib.util.find_spec(package) is None:
            return Verdict(title, "skipped", f"{package} is not installed")
        result = subprocess.run(
            [sys.executable, "-m", *(word.replace(FOLDER, str(folder)) for word in command.words)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._left_s,
            check=False,
        )
        self._outputs.append(Output(title, " ".join(("python -m", *command.words)), result.stdout))
        last = (result.stdout.strip().splitlines() or [""])[-1]
        return Verdict(title, "ok" if result.returncode == 0 else "failed", f"exit code {result.returncode}: {last}")

    def _write(self) -> None:
        from lab.gpu_check.page import page
        from parallel.machine.atomic_write import atomic_write

        minutes = (time.monotonic() - self._started) / 60
        with atomic_write(self._output) as stream:
            stream.write(page(self._verdicts, self._outputs, minutes=minutes).encode())


def megamem(*words: object) -> None:
    """Run a command of this program.

    Raises:
        RuntimeError: the command failed; the message has the last that it said.
    """
    result = subprocess.run(
        _words(*words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(
            f"megamem {words[0]} ended with {result.returncode}: {' '.join(result.stdout.split())[-500:]}"
        )


def _words(*words: object) -> list[str]:
    return [sys.executable, "-m", "tools.cli", *map(str, words)]


def _losses(folder: Path) -> dict[int, float]:
    """Losses by step; of a step that was taken twice, the last."""
    try:
        rows = read_metrics(folder / "metrics.jsonl")
    except OSError:
        return {}
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
