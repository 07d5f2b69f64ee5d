"""Commands on tiny models: run in forks of this process, which has paid for the imports, on a corpus and from runs that
are made once for all test processes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from commands import TINY, Command, MadeOnce, Megamem, Result, Start, assert_no_orphans, start_command
from refused_disk import own_mounts_are_allowed, place, refused, words  # noqa: F401 (fixtures)
from slurm_cluster import Cluster, missing_programs
from slurm_site import Site

from pretrain.data.prepare import prepare
from pretrain.data.tokenizer import ByteTokenizer
from tests.warm import import_commands, import_kernels_and_layers
from tools.common.ranks import import_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a cluster come first: they wait, while processes that got other files work."""
    items.sort(key=lambda item: not item.path.name.startswith("test_slurm"))


@pytest.fixture(scope="session")
def warm() -> None:
    """Everything imported that commands and ranks need, before the first of them is forked."""
    import_engine()
    import_kernels_and_layers()
    import_commands()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Folder that the first test process makes that asks for it, and all of them read. Copy it to change it."""
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Every worker has a folder in that of the session.
        session = session.parent

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, whole = session / f"once_{name}", session / f"once_{name}.whole"
        with (session / f"once_{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                # Of a test process that failed to make it.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def corpus(made_once: MadeOnce, warm: None) -> Path:
    """A prepared data set of some of the standard library's sources, a hundredth of which is held out."""

    def make(folder: Path) -> None:
        sources = folder / "sources"
        sources.mkdir()
        stdlib = Path(sysconfig.get_path("stdlib"))
        for path in (*sorted(stdlib.glob("json/*.py")), *sorted(stdlib.glob("[a-c]*.py"))):
            shutil.copy(path, sources)
        prepare([str(sources)], folder / "data", ByteTokenizer(), validation_fraction=0.01, num_workers=1)

    return made_once("corpus", make) / "data"


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The tiny model's configuration."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "data": {"datasets": [{"path": str(corpus)}]}}))
    return path


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Iterator[Start]:
    """Starts `megamem ARGS...` in the background; it is gone when the test ends."""
    folder = tmp_path_factory.mktemp("background")
    commands: list[Command] = []

    def start(*args: object, before: Callable[[], None] | None = None) -> Command:
        commands.append(start_command(args, folder / f"{len(commands)}.log", before))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


@pytest.fixture(scope="session")
def megamem(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Megamem:
    """Runs `megamem ARGS...` to its end, after which no process of it may be left."""
    folder = tmp_path_factory.mktemp("commands")
    logs = (folder / f"{number}.log" for number in itertools.count())

    def run(*args: object, before: Callable[[], None] | None = None) -> Result:
        command = start_command(args, next(logs), before)
        try:
            result = command.wait()
        finally:
            command.kill()
        assert_no_orphans(command)
        return result

    return run


@pytest.fixture(scope="session")
def trained(made_once: MadeOnce, megamem: Megamem, config_file: Path) -> Path:
    """A run on one rank that has learnt something, of a model whose memory is large beside the rest."""
    options = (
        "model.num_layers=2",
        "model.ffn_hidden_size=32",
        "model.memory.num_keys=32",
        "model.memory.value_dim=32",
        "model.memory.pre_value_dim=16",
        "model.memory.top_k=8",
        "optimizer.lr=1e-2",
        "optimizer.value_lr_multiplier=5",
        "optimizer.value_lr_end_multiplier=2",
        "optimizer.pre_value_lr_multiplier=null",
        "train.num_steps=160",
        "train.global_batch_size=16",
        "train.micro_batch_size=16",
        "checkpoint.every_steps=80",
    )
    return made_once("trained", lambda folder: _train(megamem, config_file, folder / "run", *options)) / "run"


@pytest.fixture(scope="session")
def saved_run(made_once: MadeOnce, megamem: Megamem, config_file: Path) -> Path:
    """The tiny model on one rank with checkpoints of steps 3 and 6."""
    options = ("train.num_steps=6", "checkpoint.every_steps=3")
    return made_once("saved", lambda folder: _train(megamem, config_file, folder / "run", *options)) / "run"


def _train(megamem: Megamem, config_file: Path, run: Path, *options: str) -> None:
    result = megamem("train", config_file, "--run-dir", run, *options)
    assert result.code == 0, result.output


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of two cores. Where Slurm is not installed its tests are skipped, but not in CI."""
    if missing := missing_programs():
        message = f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    # Not pytest's own folder: sockets have short names.
    with (
        tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder,
        Cluster(Path(folder), 3) as it,
    ):
        yield it


@pytest.fixture
def site(cluster: Cluster, megamem: Megamem, config_file: Path, tmp_path: Path) -> Iterator[Site]:
    # A name in which bash and sbatch would each find something.
    folder = tmp_path / 'it\'s the "site" #1, $HOME'
    folder.mkdir()
    site = Site(cluster, megamem, config_file, folder)
    yield site
    cluster.end_all_jobs()
