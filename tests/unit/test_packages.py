"""Others have packages and files of our packages' names: we find ours, and they theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamem.packages import PACKAGES
from tests.installing import built, copied_sources, run_python

REPOSITORY = Path(__file__).parents[2]
# Somebody's `import kernels`; then the program, where our ops, and those of a process that it spawns, are ours.
BOTH = """
import importlib.util, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import kernels, tools
print(kernels.OWNER, tools.OWNER)
del sys.modules["kernels"], sys.modules["tools"]
from megamem.start import main
assert main(["--version"]) == 0
import kernels, parallel.processes.ranks, slurm.snapshot
print(kernels.__path__[0])
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    print(pool.submit(importlib.util.find_spec, "tools.cli").result().origin)
"""
SNAPSHOT = """
import sys
from megamem.packages import put_ours_first
put_ours_first()
from pathlib import Path
from slurm.snapshot import code_hash, take_snapshot
name = take_snapshot(Path(sys.argv[1]))
assert code_hash() == code_hash(Path(sys.argv[1], name)) == name
print(name)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("build_wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder of somebody who has packages of our names."""
    for package in ("kernels", "parallel", "configs", "tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("OWNER = 'theirs'\n")
    (tmp_path / "tools.py").write_text("OWNER = 'theirs'\n")
    (tmp_path / "slurm").mkdir()
    return tmp_path


def test_the_packages_are_all_that_there_are() -> None:
    assert set(PACKAGES) == {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"lab", "tests"}


def test_a_wheel_has_every_module_and_no_name_that_others_have(installed: Path) -> None:
    assert {path.name for path in installed.iterdir()} == {"megamem", "megamem_rooms", "megamem-0.1.0.dist-info"}
    assert {path.name for path in (installed / "megamem_rooms").iterdir()} == {*PACKAGES, "configs"} - {"megamem"}
    sources = {
        path.relative_to(REPOSITORY)
        for name in PACKAGES
        for path in (REPOSITORY / name).rglob("*.*")
        if path.suffix not in (".md", ".pyc")
    }
    there = {
        path.relative_to(folder)
        for folder in (installed, installed / "megamem_rooms")
        for path in folder.rglob("*.*")
        if path.relative_to(folder).parts[0] in PACKAGES and path.is_file()
    }
    assert sources == there


def test_a_wheel_has_every_configuration_and_finds_profiles_by_name(installed: Path, tmp_path: Path) -> None:
    configs = installed / "megamem_rooms" / "configs"
    there = {path.relative_to(configs) for path in configs.rglob("*") if path.is_file()}
    assert there == {path.relative_to(REPOSITORY / "configs") for path in (REPOSITORY / "configs").rglob("*.yaml")}
    words = ("plan", configs / "ultramemv2" / "227m_1.2b.yaml", "--gpus", 1, "--gpu", "h100-80g")
    assert "layouts on 1 GPUs" in run_python("-m", "megamem", *words, path=(installed,), cwd=tmp_path)
    found = "from megamem.packages import put_ours_first; put_ours_first(); from slurm.profile import find_profile; print(find_profile('local'))"
    assert Path(run_python("-c", found, path=(installed,), cwd=tmp_path).strip()) == configs / "clusters" / "local.yaml"


def test_an_editable_installation_has_no_name_that_others_have(sources: Path, tmp_path: Path) -> None:
    (finder,) = built("build_editable", sources, tmp_path).glob("__editable__*.py")
    mapping = re.search(r"^MAPPING.*= (\{.*\})$", finder.read_text(encoding="utf-8"), re.MULTILINE)
    assert mapping is not None
    assert {name.partition(".")[0] for name in re.findall(r"'([\w.]+)':", mapping[1])} == {"megamem", "megamem_rooms"}


@pytest.mark.parametrize("where", ["checkout", "wheel"])
def test_nobody_hides_another(where: str, installed: Path, others: Path) -> None:
    ours = REPOSITORY if where == "checkout" else installed
    theirs, version, *found = run_python("-c", BOTH, path=(others, ours), cwd=others).splitlines()
    assert theirs == "theirs theirs"
    assert version.startswith("megamem ")
    rooms = ours if where == "checkout" else ours / "megamem_rooms"
    assert [Path(path) for path in found] == [rooms / "kernels", rooms / "tools" / "cli.py"]


def test_the_program_is_a_module_too(installed: Path, others: Path) -> None:
    assert run_python("-m", "megamem", "--version", path=(installed,), cwd=others).startswith("megamem ")


def test_the_program_needs_no_laboratory(installed: Path, others: Path) -> None:
    """Even where metadata of one are found, as those of the environment that runs the tests."""
    shown = run_python("-m", "megamem", "--help", path=(installed,), cwd=others)
    assert "    study " in shown
    assert "gpu-check" not in shown
    assert "pip install ./lab" in run_python("-m", "megamem", "study", "--help", path=(installed,), cwd=others)


def test_a_snapshot_of_installed_packages_is_that_of_a_checkout_in_form(installed: Path, tmp_path: Path) -> None:
    name = run_python("-c", SNAPSHOT, tmp_path, path=(installed,), cwd=tmp_path).strip()
    assert {path.name for path in (tmp_path / name).iterdir()} == set(PACKAGES)
