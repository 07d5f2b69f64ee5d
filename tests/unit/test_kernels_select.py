"""Which implementation runs: the rule of `auto`, what is refused, and the library that the C++ kernels are compiled into."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu import build
from kernels.gather_dot import naive as naive_dot
from kernels.gather_pair import naive as naive_pair
from kernels.gather_sum import naive as naive_sum
from kernels.implementations import KernelUnavailableError, automatic, compiler, resolve, unavailable
from kernels.select import differentiable_gathers, differentiable_pair, select_kernels

REPOSITORY = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler() is None, reason=str(unavailable("cpu", "cpu")))


def without(monkeypatch: pytest.MonkeyPatch, *, triton: bool = False, compiler: bool = False) -> None:
    """A machine that lacks them."""
    if triton:
        monkeypatch.setattr("kernels.implementations.importlib.util.find_spec", lambda name: None)
    if compiler:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr("kernels.implementations.shutil.which", lambda name: None)


def test_auto_is_the_fastest_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.implementations.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("kernels.implementations.shutil.which", lambda name: "/usr/bin/c++")
    assert automatic("cuda") == "triton"
    assert automatic("cpu") == "cpu"
    without(monkeypatch, triton=True, compiler=True)
    assert automatic("cuda") == "torch"
    assert automatic("cpu") == "torch"


def test_overrides_are_for_single_ops() -> None:
    assert resolve("torch", {"gather_dot": "naive", "gather_sum": None}, "cpu") == {
        "gather_sum": "torch",
        "gather_dot": "naive",
        # No pair: it is the two above.
        "segment_accumulate": "torch",
        "tucker_topk": "torch",
        "product_topk": "torch",
    }
    mixed = select_kernels("torch", {"gather_sum": "naive"})
    assert mixed.gather_sum is naive_sum.gather_sum
    assert mixed.gather_dot is not naive_dot.gather_dot
    assert select_kernels("naive").gather_dot is naive_dot.gather_dot


def test_a_pair_is_its_gathers_where_one_of_them_is_overridden() -> None:
    """And an op of its own where it is named, or nothing is."""
    assert resolve("auto", {}, "cpu")["gather_pair"] == automatic("cpu")
    assert resolve("torch", {"gather_dot": "naive", "gather_pair": "naive"}, "cpu")["gather_pair"] == "naive"
    assert resolve("torch", {"gather_pair": "naive"}, "cpu")["gather_dot"] == "torch"
    assert select_kernels("naive").gather_pair is naive_pair.gather_pair
    assert select_kernels("torch", {"gather_pair": "naive"}).gather_pair is naive_pair.gather_pair
    calls = []

    def counted(table: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        calls.append(table.shape)
        return naive_dot.dot_rows(table, *operands)

    for overrides, expected in (({}, 0), ({"gather_sum": "torch"}, 1)):
        kernels = select_kernels("torch", overrides)
        gathers = differentiable_gathers(kernels.implementations, replace(kernels.pieces, dot_rows=counted))
        pair = differentiable_pair(kernels.implementations, kernels.pieces, *gathers)
        pair(
            torch.ones(2, 4),
            torch.ones(2, 6),
            torch.zeros(1, 3, dtype=torch.int64),
            torch.ones(1, 4),
            torch.ones(1, 3, 1),
        )
        assert len(calls) == expected


def test_what_cannot_run_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelUnavailableError, match=r"gather_dot: the implementation triton needs"):
        select_kernels("torch", {"gather_dot": "triton"}, device_type="cpu")
    with pytest.raises(KernelUnavailableError, match=r"cpu is for tables on the CPU.*use auto or triton"):
        select_kernels("cpu", device_type="cuda")
    without(monkeypatch, compiler=True)
    with pytest.raises(KernelUnavailableError, match=r"needs a C\+\+ compiler.*install g\+\+"):
        select_kernels("cpu", device_type="cpu")


def test_without_triton_its_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, triton=True)
    assert "pip install" in str(unavailable("triton", "cuda"))


@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """Four at once; the compiler is a script that counts its calls."""
    counter, script = tmp_path / "calls", tmp_path / "counting-c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {counter};; esac\nexec {compiler()} "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "CXX": str(script), "MEGAMEM_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "from kernels.cpu.build import *; print(build(cache_folder(), compiler()))"]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    paths = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    (path,) = paths
    assert Path(path).is_file()
    assert counter.read_text().count("x") == 1
    # Nothing but the library and the lock is left.
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {Path(path).name, "rows.lock"}


def test_a_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(KernelUnavailableError, match=r"do not compile here[^$]*no such instruction"):
        build.build(tmp_path / "cache", str(script))


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailableError, match="set MEGAMEM_CACHE_DIR"):
        build.build(tmp_path / "file" / "cache", "c++")


def test_the_library_is_another_for_another_compiler_or_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build._key("/usr/bin/g++"), build._key("/usr/bin/clang++")}
    monkeypatch.setattr(build, "_instruction_set", lambda: "flags: none")
    assert len({*keys, build._key("/usr/bin/g++")}) == 3
