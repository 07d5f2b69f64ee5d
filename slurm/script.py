"""The batch script of a run. It stays short: what needs thought is asked of `python -m tools.job`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from parallel.machine.environment import settle_environment
from pretrain.config.overlap import queues_of
from pretrain.config.schema import RunConfig
from slurm.profile import ClusterConfig
from slurm.quoting import comment, directive, log_folder, quoted_word, shell_word
from slurm.records import JobsFolder, Submission

_REASONS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues: docs/decisions.md says how many this layout gets",
    "PYTORCH_CUDA_ALLOC_CONF": "tables are few and large: fixed segments would fragment",
    "CUBLAS_WORKSPACE_CONFIG": "train.deterministic",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "train.deterministic",
}


def render(
    stages: Sequence[RunConfig], profile: ClusterConfig, submission: Submission, jobs: JobsFolder, *, time: str
) -> str:
    """The script that `sbatch` gets, and that every requeued attempt runs again.

    Args:
        stages: resolved configurations of the stages that the job trains.
        submission: nodes, code and lead.
        jobs: the folder in which the script lies. No other path enters but those of the profile.
        time: limit of an attempt, as Slurm has it.

    Raises:
        ConfigError: a name or a path is nothing that a script can hold.
    """
    name = job_name(stages[0], submission)
    blocks = [
        [
            "#!/bin/bash",
            comment(
                "the name of the run, its stage or its cluster",
                f"{name} on {submission.nodes} x {submission.ranks_per_node} ranks, cluster {submission.cluster}. "
                "Written by `megamem submit`, and anew by the next one.",
            ),
            *directives(name, profile, submission, jobs, time),
        ],
        [
            "set -u",
            f"records={shell_word('the run folder', jobs.path)}",
            "export SLURM_EXPORT_ENV=ALL  # steps get what this script sets",
        ],
        _STOP.splitlines(),
        list(_modules(profile)),
        list(_environment(stages, profile)),
        list(_python(profile, jobs)),
        _INSIST.splitlines(),
        _LIVE_NODES.splitlines(),
        [f"nodes_of_job() {{ {'live_nodes' if profile.outlives_nodes else 'scontrol show hostnames | paste -sd,'}; }}"],
        (_BEGIN if profile.outlives_nodes else _BEGIN.replace(" node_list ", " _ ")).splitlines(),
        list(_ranks(profile)),
        _END.splitlines(),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def render_array(
    name: str,
    runs: Sequence[JobsFolder],
    profile: ClusterConfig,
    submission: Submission,
    folder: Path,
    at_once: int | None,
) -> str:
    """The script of a job array, whose members run the scripts of their runs.

    Args:
        name: name of the array.
        runs: runs in the order of their numbers. They differ in nothing that sbatch reads.
        profile, submission: profile and request of any of the runs.
        folder: the folder in which the script lies.
        at_once: most of them that run at the same time; None: no limit.
    """
    limit = "" if at_once is None else f"%{at_once}"
    given = list(directives(name, profile, submission, runs[0], profile.time))
    own = ("#SBATCH --output=", "#SBATCH --chdir=")
    blocks = [
        [
            "#!/bin/bash",
            comment(
                "the name of the cluster",
                f"{len(runs)} runs on {submission.nodes} x {submission.ranks_per_node} ranks each, cluster "
                f"{submission.cluster}. Written by `megamem submit --sweep`.",
            ),
            *(line for line in given if not line.startswith(own)),
            directive(f"--array=0-{len(runs) - 1}{limit}"),
            directive(f"--output={log_folder('the folder of the sweep', folder) / 'array_%A_%a.log'}"),
            directive(f"--chdir={folder}"),
        ],
        ["runs=(", *(f"  {shell_word('the run folder', records.path)}" for records in runs), ")"],
        [
            "records=${runs[$SLURM_ARRAY_TASK_ID]}",
            f'cd "$records/code/{submission.code}" || exit',
            'exec bash "$records/job.sh" >>"$records/job_${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log" 2>&1',
        ],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def job_name(config: RunConfig, submission: Submission) -> str:
    """Name of a job: that of its run, and of the stage of it that it trains."""
    return config.name if submission.stage is None else f"{config.name}-{submission.stage}"


def directives(name: str, profile: ClusterConfig, submission: Submission, jobs: JobsFolder, time: str) -> Iterator[str]:
    """Directives that sbatch reads of a script."""
    optional = {
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "gpus-per-node": profile.gpus_per_node or None,
        "mem": profile.memory_per_node,
        "exclude": ",".join(profile.excluded_nodes) or None,
    }
    options = {
        "job-name": name,
        **{name: value for name, value in optional.items() if value is not None},
        "nodes": submission.nodes + profile.spare_nodes,
        "ntasks-per-node": submission.ranks_per_node,
        "cpus-per-task": profile.cpus_per_rank,
        "time": time,
        "output": log_folder("the run folder", jobs.path) / "job_%j.log",
        "open-mode": "append",
        # To the batch shell alone, which tells the ranks.
        "signal": f"B:USR1@{submission.lead_s}",
        # Nothing of the submitting shell.
        "export": "NIL",
        "chdir": jobs.code / submission.code,
    }
    for name, value in options.items():
        yield directive(f"--{name}={value}")
    yield directive("--requeue")
    if profile.outlives_nodes:
        # The job outlives its nodes, except for the one on which this script runs.
        yield directive("--no-kill")
    if profile.exclusive:
        yield directive("--exclusive")
    for option in profile.sbatch_options:
        yield directive(option)


def _modules(profile: ClusterConfig) -> Iterator[str]:
    if profile.modules:
        # Defines `module`, which only login shells know.
        yield "# shellcheck disable=SC1091"
        yield "source /etc/profile"
        yield f"module load {' '.join(shell_word('modules', name) for name in profile.modules)} || exit"


def _environment(stages: Sequence[RunConfig], profile: ClusterConfig) -> Iterator[str]:
    """Everything that libraries read when they start, in the order of who asked for it."""
    yield "# What the ranks' libraries read when they start."
    given = {entry.name for entry in profile.environment}
    if "OMP_NUM_THREADS" not in given:
        # As ranks of one machine heed it.
        cores = profile.cpus_per_rank
        yield f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"  # cores of a rank, if modules say no other'
    yield "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  # ranks follow from Slurm's variables"
    yield (
        f'export TRITON_CACHE_DIR={shell_word("scratch_path", profile.scratch_path)}"/megamem-$UID/triton"  '
        "# on the node's disk: ranks would meet in one folder of the home directory"
    )
    settled: dict[str, str] = dict.fromkeys(("TRITON_CACHE_DIR",), "")
    if profile.gpus_per_node:
        settle_environment(**queues_of(stages), deterministic=stages[0].train.deterministic, environ=settled)
    for name, value in settled.items():
        if name in _REASONS and name not in given:
            yield f"export {name}={shell_word(name, value)}  {comment(name, _REASONS[name])}"
    for entry in profile.environment:
        if entry.file is not None:
            # Two lines: `export` would hide that the file is not there.
            yield f"{entry.name}=$(<{shell_word('file', entry.file)}) || exit  {comment('reason', entry.reason)}"
            yield f"export {entry.name}"
            continue
        yield f"export {entry.name}={shell_word(entry.name, entry.value)}  {comment('reason', entry.reason)}"


def _python(profile: ClusterConfig, jobs: JobsFolder) -> Iterator[str]:
    """`python`, in which ranks run, and `once`, which runs it beside them, for decisions."""
    interpreter = "python3"
    if profile.virtual_environment is not None:
        interpreter = f"{profile.virtual_environment}/bin/python"
    container = profile.container
    folders = (*profile.shared_paths, profile.scratch_path)
    if container is None:
        yield f"python=({shell_word('virtual_environment', interpreter)})"
        yield 'once=("${python[@]}")'
        yield "in_container=()"
    elif container.runtime == "apptainer":
        binds = ",".join((*folders, *container.mounts))
        nv = "--nv " if profile.gpus_per_node else ""
        image, binds = shell_word("container.image", container.image), quoted_word("container.mounts", binds)
        python = shell_word("virtual_environment", interpreter)
        yield f"python=(apptainer exec {nv}--bind {binds} {image} {python})"
        yield 'once=("${python[@]}")'
        yield "in_container=()"
    else:
        mounts = ",".join((*(f"{folder}:{folder}" for folder in folders), *container.mounts))
        yield f"python=({shell_word('virtual_environment', interpreter)})"
        yield (
            f"in_container=(--container-image={shell_word('container.image', container.image)} "
            f"{quoted_word('container.mounts', f'--container-mounts={mounts}')} "
            '--container-workdir="$PWD")'
        )
        yield 'once=(srun --overlap --nodes=1 --ntasks=1 "${in_container[@]}" "${python[@]}")'


def _ranks(profile: ClusterConfig) -> Iterator[str]:
    """One task per rank. Each one's output goes to a file of its own in the attempt's folder."""
    options = [
        *(['--nodelist="$node_list"'] if profile.outlives_nodes else []),
        '--nodes="$nodes"',
        f'--ntasks="$((nodes * {profile.ranks_per_node}))"',
        f"--ntasks-per-node={profile.ranks_per_node}",
        # Since Slurm 22.05 srun does not take this over from sbatch's option.
        f"--cpus-per-task={profile.cpus_per_rank}",
        *(["--cpu-bind=cores"] if profile.cpu_binding == "cores" else []),
        "--kill-on-bad-exit=1",
        "--wait=60",
        '--output="$attempt/rank_%t.log"',
    ]
    if profile.gpus_per_node:
        options += (
            ["--gpus-per-task=1"] if profile.gpu_binding == "single" else [f"--gpus-per-node={profile.gpus_per_node}"]
        )
    options += [shell_word("srun_options", option) for option in profile.srun_options]
    yield "if [[ -z $asked ]]; then"
    yield f"  srun {_wrapped(options)} \\"
    yield '    "${in_container[@]}" "${python[@]}" -m tools.job rank "$records" "$attempt" 2>"$attempt/srun.log" &'
    yield "  ranks=$!"
    yield "fi"


def _wrapped(options: Sequence[str], per_line: int = 4) -> str:
    lines = [" ".join(options[at : at + per_line]) for at in range(0, len(options), per_line)]
    return " \\\n    ".join(lines)


_STOP = """\
# The time limit, or preemption: the ranks finish their step, save, and end.
asked='' ranks=none timer=''
stop() {
  asked=--asked-to-stop
  [[ $ranks == none ]] || kill -USR1 "$ranks" 2>/dev/null
}
trap stop USR1 TERM"""

_INSIST = """\
# One lost answer of the controller must not lose the run. While it is away nobody else can have these nodes either, so it
# is waited for; what it refuses for five minutes is given up. What it says is left in `answer`.
insist() {
  local tries=0
  until answer=$("$@" 2>&1); do
    answer="$(date -u +%FT%TZ) $*: $answer"
    echo "$answer" >&2
    tries=$((tries + 1))
    scontrol ping 2>/dev/null | grep -q 'is UP' || tries=0
    ((tries < 20)) || return 1
    sleep 15
  done
  answer=$(tail -n 1 <<<"$answer")
}
give_up() {
  echo "$answer" >"$attempt/refused.txt"
  exit "$((code == 0 ? 1 : code))"
}
# The run's own disk may be full: then Slurm's record of the job is the place for the reason.
say_in_slurm() {
  local said=${2##*$'\\n'}
  insist scontrol update JobId="$SLURM_JOB_ID" Comment="${said:-no word of what follows}"
  exit "$1"
}"""

_LIVE_NODES = """\
# Those that answer: the controller takes minutes to notice that one has died.
live_nodes() {
  local node
  for node in $(scontrol show hostnames "$(squeue -h -j "$SLURM_JOB_ID" -o %N)"); do
    { timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" true 2>/dev/null && echo "$node"; } &
  done | sort -V | paste -sd,
}"""

_BEGIN = """\
# An attempt of its own, or the reason why there must be none.
insist squeue -h -j "$SLURM_JOB_ID" -o %L || answer=''
plan=$("${once[@]}" -m tools.job begin "$records" --nodes "$(nodes_of_job)" --time-left "$answer") || say_in_slurm $? "$plan"
[[ -n $plan ]] || exit 0
read -r number nodes stop_after_s node_list <<<"$plan"
attempt=$records/attempts/$number
if [[ $stop_after_s != never ]]; then
  # Saves were measured to take longer than Slurm's signal leaves.
  (sleep "$stop_after_s" && kill -USR1 $$) &
  timer=$!
fi"""

_END = """\
# Of ranks that never started.
code=75
if [[ $ranks != none ]]; then
  [[ -z $asked ]] || stop
  # A signal ends `wait`, not the ranks.
  wait "$ranks"
  while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done
  wait "$ranks"
  code=$?
  ranks=none
  cat "$attempt/srun.log" >&2
fi
[[ -z $timer ]] || { kill "$timer" && wait "$timer"; } 2>/dev/null

# Its state now, why, how often Slurm has requeued it, and how long it may go on; and, after a failure, its nodes.
insist squeue -h -j "$SLURM_JOB_ID" -O State:40,Reason:60,RestartCnt:20,TimeLeft:20 || answer=''
verdict=$("${once[@]}" -m tools.job end "$records" "$attempt" --exit-code "$code" $asked \\
  --standing "$answer" --nodes "$([[ -n $asked || $code == 0 ]] || live_nodes)") || say_in_slurm $? "$verdict"
read -r action delay_s exclude next <<<"$verdict"
case $action in
  done) exit 0 ;;
  again) exec bash "$records/job.sh" ;;
  requeue) insist scontrol requeue "$SLURM_JOB_ID" || give_up ;;
  resubmit)
    # Slurm changes neither start nor nodes of a job that runs.
    [[ $exclude != none ]] || exclude=''
    insist sbatch --parsable --begin="now+$delay_s" ${exclude:+--exclude="$exclude"} "$records/job.sh" || give_up
    job=${answer%%;*}
    "${once[@]}" -m tools.job queued "$records" "$job"
    # The next stage's job waits for the success of this one, which from now on is that one's.
    [[ $next == none ]] || insist scontrol update JobId="$next" Dependency="afterok:$job" || give_up ;;
  *) exit "$((code == 0 ? 1 : code))" ;;
esac"""
