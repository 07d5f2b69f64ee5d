"""Choice of the implementation that runs: the rule of `auto`, what is refused, and the library that the C++ kernels are
compiled into.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import multiprocessing
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import cpp
from kernels.common.ops import body_of
from kernels.gather_dot import naive as naive_dot
from kernels.gather_sum import naive as naive_sum
from kernels.implementations import KernelUnavailableError, automatic, compiler, unavailable
from kernels.select import OPS, assemble, implementation_of, resolve, select_kernels

REPOSITORY = Path(__file__).parents[3]
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
    assert resolve("torch", {"gather_dot": "naive"}, "cpu") == {**dict.fromkeys(OPS, "torch"), "gather_dot": "naive"}
    mixed = select_kernels("torch", {"gather_sum": "naive"})
    assert mixed.gather_sum is naive_sum.gather_sum
    assert mixed.gather_dot is not naive_dot.gather_dot
    assert select_kernels("naive").gather_dot is naive_dot.gather_dot


def test_an_op_without_cpp_is_pytorchs_unless_it_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp, "source", lambda op: tmp_path / "none" if op == "tucker_topk" else tmp_path)
    assert resolve("cpu", {}, "cpu") == {**dict.fromkeys(OPS, "cpu"), "tucker_topk": "torch"}
    with pytest.raises(
        KernelUnavailableError, match=r"tucker_topk: there is no C\+\+ implementation: use auto or torch"
    ):
        resolve("torch", {"tucker_topk": "cpu"}, "cpu")


def test_an_op_without_triton_is_pytorchs_unless_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.select._has_source", lambda op, name: (op, name) != ("tucker_scores", "triton"))
    assert resolve("triton", {}, "cuda") == {**dict.fromkeys(OPS, "triton"), "tucker_scores": "torch"}
    with pytest.raises(KernelUnavailableError, match=r"tucker_scores: there is no Triton implementation"):
        resolve("torch", {"tucker_scores": "triton"}, "cuda")


@needs_compiler
def test_an_override_is_seen_in_the_gradients_of_other_ops() -> None:
    """The gradient of the coefficients of one gather is the other gather."""
    kernels = select_kernels("cpu", {"gather_dot": "naive"}, device_type="cpu")
    calls: list[tuple[int, ...]] = []

    def counted(table: Tensor, *operands: Any) -> Tensor:
        calls.append(table.shape)
        return naive_dot.gather_dot(table, *operands)

    counting = assemble(kernels.implementations, {**kernels.raw, "gather_dot": counted})
    coef = torch.ones(1, 3, 1, requires_grad=True)
    counting.gather_sum(torch.ones(2, 4), torch.zeros(1, 3, dtype=torch.int64), coef).sum().backward()
    assert calls == [(2, 4)]


FILES = {
    "README.md",
    "__init__.py",
    "naive.py",
    "cpu.cpp",
    "triton_op.py",
    "op.py",
}


@pytest.mark.parametrize("op", [*OPS, "list_topk"])
def test_the_folder_of_an_op_looks_like_every_other(op: str) -> None:
    found = {path.name for path in (REPOSITORY / "kernels" / op).iterdir() if path.is_file()}
    assert FILES - {"cpu.cpp", "triton_op.py"} <= found <= FILES
    functions = [implementation_of(op, name) for name in ("naive", "torch")]
    # A custom op has no parameters by name.
    twin, in_torch = (inspect.signature(body_of(function)) for function in functions)
    assert list(in_torch.parameters) == list(twin.parameters)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "kernels").glob("*/naive.py")), ids=lambda path: path.parent.name)
def test_a_twin_shares_nothing_with_what_it_judges(path: Path) -> None:
    """A twin may use another op's twin, the published hash, and the type of an argument."""
    imported = re.findall(r"^\s*(?:from|import) (kernels[\w.]*)(.*)", path.read_text(), re.MULTILINE)
    shared = [name + what for name, what in imported if not name.endswith(".naive")]
    assert set(shared) <= {"kernels.common.hashing import mix", "kernels.common.rounding import Rounding"}


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
def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four forks at once; the compiler is a script that counts its calls."""
    counter, script = tmp_path / "calls", tmp_path / "counting-c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {counter};; esac\nexec {compiler()} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("MEGAMEM_CACHE_DIR", str(tmp_path / "cache"))
    fork = multiprocessing.get_context("fork")
    together, paths = fork.Barrier(4), fork.SimpleQueue()

    def build() -> None:
        together.wait()
        paths.put(str(cpp.build("gather_dot", cpp.cache_folder(), str(compiler()))))

    processes = [fork.Process(target=build) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 4
    (path,) = {paths.get() for _ in processes}
    assert Path(path).is_file()
    assert counter.read_text().count("x") == 1
    # Nothing but the library and the lock is left.
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {Path(path).name, "gather_dot.lock"}


def test_a_compiler_that_fails_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho no such instruction >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(KernelUnavailableError, match=r"do not compile here[^$]*no such instruction"):
        cpp.build("gather_dot", tmp_path / "cache", str(script))


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelUnavailableError, match="set MEGAMEM_CACHE_DIR"):
        cpp.build("gather_dot", tmp_path / "file" / "cache", "c++")


def test_the_library_is_another_for_another_compiler_or_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cpp._key("gather_dot", "/usr/bin/g++"), cpp._key("gather_dot", "/usr/bin/clang++")}
    monkeypatch.setattr(cpp, "instruction_set", lambda: "flags: none")
    assert len({*keys, cpp._key("gather_dot", "/usr/bin/g++")}) == 3


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only here are there narrower vectors to compile for")
def test_bits_do_not_depend_on_the_width_of_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's against the narrowest: whole vectors, parts of one, and tails."""
    kernels, path = select_kernels("cpu", device_type="cpu"), compiler()
    assert path is not None

    def results() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        found = []
        for dtype, width in itertools.product(
            (torch.float32, torch.bfloat16), (1, 3, 7, 8, 15, 24, 33, 64, 65, 130, 200, 545)
        ):
            table, x = torch.randn(12, width, generator=g).to(dtype).split((9, 3))
            ids, coef = torch.randint(0, 9, (3, 7), generator=g), torch.randn(3, 7, 1, generator=g).to(dtype)
            found += [kernels.gather_sum(table, ids, coef), kernels.gather_dot(table, ids, x)]
            if width % 2 == 0:
                found.append(kernels.gather_sum(table, ids, torch.cat((coef, -2 * coef), 2)))
        return found

    of_this_machine = results()
    narrow = {"-march=native": "-march=x86-64"}
    monkeypatch.setattr(cpp, "_COMPILE", tuple(narrow.get(flag, flag) for flag in cpp._COMPILE))
    libraries = {op: ctypes.CDLL(str(cpp.build(op, tmp_path, path))) for op in ("gather_sum", "gather_dot")}
    monkeypatch.setattr(cpp, "library", libraries.__getitem__)
    assert all(torch.equal(a, b) for a, b in zip(results(), of_this_machine, strict=True))
