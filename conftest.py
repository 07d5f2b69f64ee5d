"""Settings and fixtures of all tests: one thread per process, Triton's interpreter without a GPU, the golden cases."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


def _settle_process() -> None:
    """One thread per process: sums then do not depend on the machine's cores, and ranks are forked from a process
    without threads.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # Commands under test have as many threads as cores, beside those of other tests: they sleep while they wait.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if hasattr(os, "SCHED_BATCH"):
        # Ranks wake each other hundreds of times in a step, and share cores: whoever is woken waits for its turn, and does
        # not push aside the one that runs, which costs two switches. Forks and threads inherit it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    from parallel.machine.devices import keep_cuda_out_of_this_process

    # Ranks are forked from this process.
    keep_cuda_out_of_this_process()
    # Not at the top of the file: the variables have to be there before torch is loaded.
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Triton decides when it is imported: without a GPU its kernels are interpreted.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # Megatron decorates functions with torch.compile, none of which runs on a CPU: that imports Inductor, which takes
        # a fifth of the start of this process and of every command that is started as one.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # The first backward pass of a process starts a thread per device, and forks cannot have any. Fake tensors pretend
        # that there is a GPU where PyTorch's usual build finds none: let the first pass be before them.
        torch.ones(1, requires_grad=True).sum().backward()
    from hypothesis import settings

    # Hypothesis's deadline of 200 ms per example is an assertion about the machine: on a busy one right code fails.
    settings.register_profile("megamem", deadline=None)
    settings.load_profile("megamem")


# At import, which is before that of any other file of tests: hooks come after `conftest.py` of a folder that is named on
# the command line.
_settle_process()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of `tests.costly`."""
    config.addinivalue_line("markers", "costly: takes long and seldom breaks; skipped unless MEGAMEM_COSTLY is set")


def pytest_report_header() -> str:
    """Say which cases are run, as those of next week may fail where these pass."""
    from tests.rotation import WEEK

    return "cases: all" if WEEK is None else f"cases: the share of week {WEEK} (make test CASES=all runs every one)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip costly tests that were not asked for."""
    if item.get_closest_marker("costly") and "MEGAMEM_COSTLY" not in os.environ:
        pytest.skip("costly: `make test-more` runs it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import all modules without collecting garbage, which finds none in a heap that grows by them, and leave them to
    no later collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Tests make many objects that live as long as a fixture: Python's default looks at them every 700 objects.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread files over processes, but leave both of a Slurm cluster to one: they wait, and would hold two."""
    from xdist.scheduler import LoadFileScheduling

    class WithALaneForSlurm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return "slurm" if scope.startswith("tests/integration/test_slurm") else scope

    return WithALaneForSlurm(config, log)


@pytest.fixture(scope="session", autouse=True)
def _several_chunks() -> Iterator[None]:
    """Make every test reach a second chunk of what is done in chunks."""
    from tests.small_chunks import CHUNKS, small

    with small(CHUNKS):
        yield


@pytest.fixture(scope="session")
def golden_dir(pytestconfig: pytest.Config) -> Path:
    """Folder of the golden cases: `$MEGAMEM_GOLDEN_DIR`, which must be there, or `shared/golden` beside the repository.
    Skips where neither is, but fails in CI, where nobody reads what was skipped.
    """
    beside = pytestconfig.rootpath.parent / "shared" / "golden"
    named = os.environ.get("MEGAMEM_GOLDEN_DIR")
    folder = Path(named or beside)
    if named and not folder.is_dir():
        pytest.fail(f"MEGAMEM_GOLDEN_DIR is {named}, which is no folder: correct it, or unset it to skip these tests")
    if not folder.is_dir():
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"no golden cases in {folder}: set MEGAMEM_GOLDEN_DIR to their folder, or put them at {beside}")
    return folder


@pytest.fixture(scope="session")
def remote_code_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make transformers copy code of model folders to a place of the session's own, as it imports from there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("remote_code"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        yield
