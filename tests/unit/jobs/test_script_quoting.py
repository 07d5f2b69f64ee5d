"""Texts in the batch script: sbatch and bash see exactly what was meant, or it is refused by name. Both are asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.config.schema import RunConfig
from pretrain.errors import ConfigError
from pretrain.run.folder import RunFolder
from slurm.profile import ClusterConfig, ContainerConfig, VariableEntry
from slurm.records import JobsFolder, Submission
from slurm.script import render, render_array

SUBMISSION = Submission(1, "here", 3, 2, "0123456789ab", 900, "2026-01-01T00:00:00+00:00")
PROFILE = ClusterConfig(ranks_per_node=2, shared_paths=("/shared",), runs_path="/shared/runs")
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# Dense in what one of the two grammars gives a meaning.
_SIGNS = " \"'\\#$`;&|%=,:()<>[]{}*?~!-+@^/.aZ0é\u2013漢"


def text_without(letters: str = "") -> st.SearchStrategy[str]:
    dense = st.sampled_from([sign for sign in _SIGNS if sign not in letters])
    others = st.characters(exclude_categories=(*_UNPRINTABLE, "Zs"), exclude_characters=letters)
    plain = st.text("aZ0_", min_size=1, max_size=4)
    # Plain words with one sign between them: of many signs another one asks for the quotes.
    one = st.builds("{}{}{}".format, plain, dense, plain)
    return st.text(dense, min_size=1, max_size=12) | st.text(others, min_size=1, max_size=12) | one


TEXT = text_without()
NAME_IN_PATH = text_without("%\\/").map(lambda text: f"a{text}")
MOUNTED = text_without(",:")
UNPRINTABLE = st.characters(categories=_UNPRINTABLE) | st.sampled_from("\n\r\t\0\x1b\u2028\x85\xa0")
# bash has no commands of Slurm here. Their arguments go to stdout.
STAND_INS = """\
source() { :; }
module() { printf 'module\\0'; printf '%s\\0' "$@"; }
srun() { printf 'srun\\0'; printf '%s\\0' "$@"; }
"""
ASK_BASH = """\
asked='' nodes=3 attempt=ATTEMPT node_list=NODES
RANKS
wait
printf 'records\\0%s\\0' "$records"
printf 'variable\\0%s\\0%s\\0' "${A_VARIABLE-}" "$TRITON_CACHE_DIR"
"""


def named(name: str) -> RunConfig:
    """A run of any name: configurations take plain ones alone, and the script must not rely on it."""
    config = RunConfig()
    object.__setattr__(config, "name", name)
    return config


def jobs_in(folder: str) -> JobsFolder:
    return JobsFolder(RunFolder(Path("/shared") / folder))


def needs(program: str) -> None:
    if shutil.which(program) is None:
        message = f"{program} is not installed"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def seen_by_sbatch(script: str, folder: Path) -> dict[str, str]:
    """The options of a script, as sbatch reports them before it looks for a controller, which is not there."""
    conf, file = folder / "slurm.conf", folder / "job.sh"
    conf.write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\nTCPTimeout=1\n"
        "NodeName=n1 CPUs=1\nPartitionName=p Nodes=n1\n"
    )
    file.write_text(script, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    result = subprocess.run(
        ["sbatch", "--verbose", "--test-only", file],
        env={**environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        timeout=60,
    )
    assert "end of defined options" in result.stderr, result.stderr
    return {
        line[:20].rstrip(): line[22:]
        for line in (line.removeprefix("sbatch: ") for line in result.stderr.split("\n"))
        if line[20:22] == ": "
    }


def seen_by_bash(script: str) -> list[str]:
    """The words that `module` and `srun` get, then records and variables, by running all of the script but its questions."""
    head, _, rest = script.partition("nodes_of_job()")
    ranks = re.search(r"^if \[\[ -z \$asked \]\]; then\n.*?^fi$", rest, re.DOTALL | re.MULTILINE)
    assert ranks is not None
    asking = STAND_INS + head + ASK_BASH.replace("RANKS", ranks[0].replace(' 2>"$attempt/srun.log"', ""))
    result = subprocess.run(
        ["bash", "--norc"],
        input=asking,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.split("\0")


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(texts=st.lists(TEXT, min_size=12, max_size=12), folder=NAME_IN_PATH, node_folder=NAME_IN_PATH)
def test_whatever_can_be_printed_arrives(tmp_path: Path, texts: list[str], folder: str, node_folder: str) -> None:
    needs("sbatch")
    partition, account, qos, comment, srun_option, value, reason, module, python, name, stage, cluster = texts
    profile = replace(
        PROFILE,
        partition=partition,
        account=account,
        qos=qos,
        sbatch_options=(f"--comment={comment}", "--contiguous"),
        srun_options=(f"--comment={srun_option}", "--last"),
        environment=(VariableEntry("A_VARIABLE", reason + "x", value),),
        modules=(module, "second"),
        virtual_environment=f"/shared/{python}",
        scratch_path=f"/tmp/{node_folder}",
    )
    jobs = jobs_in(folder)
    config = named(name)
    script = render([config], profile, replace(SUBMISSION, stage=stage, cluster=cluster), jobs, time="2-00:00:00")

    seen = seen_by_sbatch(script, tmp_path)
    expected = {
        "job-name": f"{name}-{stage}",
        "partition": partition,
        "account": account,
        "qos": qos,
        "comment": comment,
        "output": f"{jobs.path}/job_%j.log",
        "chdir": str(jobs.code / SUBMISSION.code),
        "nodes": "3",
        "ntasks-per-node": "2",
        "cpus-per-task": "1",
        "time": "2-00:00:00",
        "open-mode": "a",
        "signal": "B:USR1@900",
        "export": "NIL",
        "requeue": "requeue",
        "contiguous": "set",
    }
    assert seen == {**expected, "verbose": "1", "test-only": "set"}

    words = seen_by_bash(script)
    at = words.index("srun")
    assert words[:at] == ["module", "load", module, "second"]
    at_python = words.index(f"/shared/{python}/bin/python", at)
    assert words[at_python - 2 : at_python] == [f"--comment={srun_option}", "--last"]
    assert words[at_python + 1 :] == [
        *("-m", "tools.job", "rank", str(jobs.path), "ATTEMPT"),
        *("records", str(jobs.path), "variable", value, f"/tmp/{node_folder}/megamem-{os.getuid()}/triton", ""),
    ]


@settings(max_examples=15, deadline=None)
@given(image=TEXT, mount=MOUNTED, shared=MOUNTED, runtime=st.sampled_from(["pyxis", "apptainer"]))
def test_words_of_containers_arrive_too(image: str, mount: str, shared: str, runtime: Any) -> None:
    profile = replace(
        PROFILE, shared_paths=(f"/{shared}",), container=ContainerConfig(runtime, image, (f"/a:{mount}",))
    )
    script = render([RunConfig()], profile, SUBMISSION, jobs_in("run"), time="1")
    words = seen_by_bash(script)
    if runtime == "pyxis":
        mounts = f"--container-mounts=/{shared}:/{shared},/tmp:/tmp,/a:{mount}"
        assert words[words.index(mounts) - 1] == f"--container-image={image}"
        assert words[words.index(mounts) + 2] == "python3"
    else:
        at = words.index("apptainer")
        assert words[at : at + 6] == ["apptainer", "exec", "--bind", f"/{shared},/tmp,/a:{mount}", image, "python3"]


@pytest.mark.parametrize("path", ["/a,b", "/a:b"])
def test_folders_that_a_container_s_runtime_would_split_are_refused(path: str) -> None:
    container = ContainerConfig("pyxis", "image")
    for key, value in {"shared_paths": (path,), "scratch_path": path}.items():
        with pytest.raises(ValueError, match=re.escape(f"whose runtime splits '{path}'")):
            replace(PROFILE, container=container, **{key: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes what follows a comma for another one"):
        ContainerConfig("pyxis", "image", ("/a:/b,/c:/d",))


@given(before=TEXT, letter=UNPRINTABLE, after=TEXT)
def test_what_no_script_can_hold_is_refused_by_name(before: str, letter: str, after: str) -> None:
    text = before + letter + after
    fields: dict[str, Any] = {
        **dict.fromkeys(
            ("partition", "account", "qos", "memory_per_node", "virtual_environment", "scratch_path"), text
        ),
        **dict.fromkeys(("shared_paths", "modules", "srun_options"), (text,)),
        "runs_path": text,
        "sbatch_options": (f"--comment={text}",),
    }
    for key, value in fields.items():
        with pytest.raises(ValueError, match=f"^{key} has "):
            replace(PROFILE, **{key: value})
    for wrong in ({"image": text, "mounts": ()}, {"image": "image", "mounts": (text,)}):
        with pytest.raises(ValueError, match="a batch script cannot hold the character"):
            ContainerConfig("pyxis", **wrong)  # type: ignore[arg-type]
    for entry in (("A", text, "value"), ("A", "reason", text), (text, "reason", "value"), ("A", "reason", None, text)):
        with pytest.raises(ValueError, match="a batch script cannot hold the character"):
            VariableEntry(*entry)
    for config, submission, jobs in (
        (named(text), SUBMISSION, jobs_in("run")),
        (RunConfig(), replace(SUBMISSION, stage=text), jobs_in("run")),
        (RunConfig(), replace(SUBMISSION, cluster=text), jobs_in("run")),
        (RunConfig(), SUBMISSION, jobs_in(text.replace("/", ""))),
    ):
        with pytest.raises(ConfigError, match=r"a batch script cannot hold|reads . in the path of a log"):
            render([config], PROFILE, submission, jobs, time="1")


@pytest.mark.parametrize("letter", ["%", "\\"])
def test_patterns_of_slurm_are_refused_in_paths_of_logs(letter: str) -> None:
    jobs = jobs_in(f"50{letter}u")
    with pytest.raises(
        ConfigError, match=r"the run folder is .*reads . in the path of a log as the start of a pattern"
    ):
        render([RunConfig()], PROFILE, SUBMISSION, jobs, time="1")
    with pytest.raises(ConfigError, match=r"the folder of the sweep is .*reads"):
        render_array("mine", [jobs_in("run")], PROFILE, SUBMISSION, jobs.run.path, None)


def test_a_secret_is_read_by_the_job_and_stands_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / 'it\'s "mine" $HOME'
    file.write_text("it's a\\secret $HOME\n")
    profile = replace(PROFILE, environment=(VariableEntry("A_VARIABLE", "a reason", file=str(file)),))
    script = render([RunConfig()], profile, SUBMISSION, jobs_in("run"), time="1")
    assert "it's a\\secret $HOME" in seen_by_bash(script)
    assert "a\\secret" not in script
    file.unlink()
    with pytest.raises(AssertionError, match="No such file or directory"):
        seen_by_bash(script)


def test_an_array_s_folder_arrives(tmp_path: Path) -> None:
    needs("sbatch")
    folder = Path('/shared/it\'s a #1 "sweep"; $HOME')
    seen = seen_by_sbatch(render_array("mine", [jobs_in("run")] * 3, PROFILE, SUBMISSION, folder, 2), tmp_path)
    assert (seen["output"], seen["chdir"]) == (f"{folder}/array_%A_%a.log", str(folder))
    assert seen["array"] == "0-2%2"
    assert seen["nodes"] == "3"


@pytest.mark.parametrize("option", ["--two words", "--two words=3", "--#", "--x y"])
def test_an_option_without_a_name_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="is no option of sbatch: write --name=value"):
        render([RunConfig()], replace(PROFILE, sbatch_options=(option,)), SUBMISSION, jobs_in("run"), time="1")
