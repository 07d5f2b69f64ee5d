"""GPUs that are visible, usable, and a rank's own; and what is settled before CUDA is touched. Without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel.machine import devices as devices_module
from parallel.machine import environment as environment_module
from parallel.machine.devices import (
    _counted_without_cuda,
    gpu_links,
    gpu_of,
    keep_cuda_out_of_this_process,
    num_visible_gpus,
    smallest_gpu_bytes,
    unseen_gpus,
    why_gpus_are_unusable,
)
from parallel.machine.environment import local_cache_folder, settle_environment
from parallel.machine.multiprocessors import context_of_share
from parallel.processes.ranks import RankEnvironment
from pretrain.config.overlap import queues_of
from pretrain.config.schema import RunConfig
from pretrain.config.stages import load_config
from pretrain.engine.session import session
from pretrain.errors import ConfigError
from tools.train import described_gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        ("", 0),
        ("0", 1),
        ("0,3", 2),
        ("-1", 0),
        ("0,-1,1", 1),
        (" ", 0),
        ("1,,2", 1),
        ("GPU-8932f937,GPU-2", 2),
        ("MIG-a/1/0", 1),
    ],
)
def test_visible_gpus_are_those_up_to_the_first_that_is_none(visible: str, number: int) -> None:
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == number


def test_a_rank_uses_what_it_sees() -> None:
    assert [gpu_of(rank, 8) for rank in range(8)] == list(range(8))
    assert [gpu_of(rank, 1) for rank in range(8)] == 8 * [0]
    with pytest.raises(ValueError, match="local rank 2 sees 2 GPUs"):
        gpu_of(2, 2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_gpus_that_this_torch_cannot_use_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        "pretrain.engine.session.current_ranks", lambda: RankEnvironment(0, 1, 0, f"file://{tmp_path}/rendezvous")
    )
    settled: list[str] = []
    monkeypatch.setattr(
        "pretrain.engine.session.settle_environment", lambda **_: settled.append("before CUDA is asked for")
    )
    with pytest.raises(ConfigError, match=r"GPUs that cannot be used: torch .* was built without CUDA.*--device cpu"):
        session(RunConfig()).__enter__()
    assert settled
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_gpus_are_unusable() is None


def test_a_driver_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", start)
    assert "CUDA 13.0 of torch" in str(why_gpus_are_unusable())
    assert "does not start: The NVIDIA driver on your system is too old" in str(why_gpus_are_unusable())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert why_gpus_are_unusable() is None


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> Path:
    """Put a program in the place of the driver's that says this, and writes down what it was asked."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/asked\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "asked"


def test_the_smallest_visible_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(tmp_path, monkeypatch, "81559\n40960")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-8f1,-1,3")
    assert smallest_gpu_bytes() == 40960 * 1024**2
    assert asked.read_text().split() == ["--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=2,GPU-8f1"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert smallest_gpu_bytes() == 40960 * 1024**2
    assert "--id" not in asked.read_text()


@pytest.mark.parametrize(("text", "code"), [("[N/A]", 0), ("81559", 9), ("", 0)])
def test_a_driver_that_says_nothing_decides_nothing(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, monkeypatch, text, code)
    assert smallest_gpu_bytes() is None
    assert gpu_links() is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert smallest_gpu_bytes() is None


TOPOLOGY = """\
\t\033[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-51\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\t52-103\t1\t\tN/A
NIC0\tPIX\tNODE\tNODE\t X

Legend:
"""


def test_links_between_gpus_are_read_from_the_drivers_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tmp_path, monkeypatch, TOPOLOGY)
    assert gpu_links() == "NV18, SYS"
    lines = TOPOLOGY.splitlines()
    answer(tmp_path, monkeypatch, "\n".join([lines[0].replace("GPU1\tGPU2\t", ""), "GPU0\t X \tPIX\t0-51"]))
    assert gpu_links() is None


def test_the_headline_names_gpu_memory_and_link(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for links, said in (("NV18", "on NVIDIA H200, 150 GB each, linked by NV18"), (None, "on NVIDIA H200, 150 GB each")):
        monkeypatch.setattr("parallel.machine.devices.gpu_links", lambda links=links: links)
        assert described_gpu(torch.device("cuda", 0)) == said


# Packages ask for GPUs while they are imported. Each of these starts the driver in this process, whose forks then cannot
# use it; `is_available` does unless it was told to ask the management library, and that is there or no GPU is visible.
IMPORT_UNDER_WATCH = """
import os
from parallel.machine.devices import keep_cuda_out_of_this_process
keep_cuda_out_of_this_process()
import torch
asked, started = [], []
def is_available():
    asked.append((os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return False
torch.cuda.is_available = is_available
for name in ("init", "_lazy_init", "device_count", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: started.append(name) or 0)
from tools.common.ranks import import_engine
import_engine()
# Asks in every build of torch, and the engine may do without it.
from parallel.machine.devices import unseen_gpus
with unseen_gpus():
    import megatron.core.dist_checkpointing.strategies.torch
print(len(asked), set(asked), started, os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_the_engines_import_does_not_start_cuda() -> None:
    # GPUs that do not work lack what counts them, as machines without GPUs do.
    visible = "" if _counted_without_cuda() else "0"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_UNDER_WATCH],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    number, rest = result.stdout.split(maxsplit=1)
    assert int(number) > 0, "nobody asked: this test could not fail"
    assert rest == f"{{('1', '')}} [] {visible}\n"


def test_a_machine_without_gpus_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for number, visible in ((2, None), (0, "")):
        monkeypatch.setattr(devices_module, "_num_gpus", lambda number=number: number)
        keep_cuda_out_of_this_process()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("visible", "library", "hidden"), [("0", True, False), ("0", False, True), ("MIG-a", True, True)]
)
def test_gpus_that_only_cuda_can_count_are_hidden_from_imports(
    visible: str, library: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: str) -> SimpleNamespace:
        if not library:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0)

    monkeypatch.setattr(devices_module.ctypes, "CDLL", load)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with unseen_gpus():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else visible)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


SPLIT, APART = "parallel.memory=2", "parallel.overlap_memory=false"


@pytest.mark.parametrize(
    ("overrides", "queues"),
    [
        ([], None),
        (["parallel.tensor=2"], "1"),
        (["parallel.context=2"], "1"),
        # The memory's kernels are launched before the feed-forward's: one queue would run them one after the other.
        ([SPLIT], "32"),
        ([SPLIT, "parallel.tensor=2"], "32"),
        ([SPLIT, "parallel.context=2"], "32"),
        ([SPLIT, "parallel.tensor=2", APART], "1"),
        ([SPLIT, "parallel.pipeline=2", APART], None),
        ([SPLIT, "parallel.tensor=2", "model.memory.placement.position=instead"], "1"),
        ([SPLIT, "parallel.tensor=2", "model.memory.placement.spans=0:1"], "1"),
        (["parallel.tensor=2", "model.memory=null"], "1"),
    ],
)
def test_every_layout_has_the_queues_that_its_overlap_needs(
    overrides: list[str], queues: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_module.tempfile, "gettempdir", lambda: str(tmp_path))
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    # A process that trains several stages has what one of them needs.
    for configs in ([config], [load_config(ROOT / "configs" / "quickstart_dense.yaml"), config]):
        environ: dict[str, str] = {}
        settled = settle_environment(**queues_of(configs), deterministic=False, environ=environ)
        assert environ == settled
        assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
        assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert environ["TRITON_CACHE_DIR"] == str(tmp_path / f"megamem-{os.getuid()}" / "triton")


def test_what_a_deterministic_run_needs() -> None:
    environ: dict[str, str] = {}
    settle_environment(**queues_of([RunConfig()]), deterministic=True, environ=environ)
    assert (environ["CUBLAS_WORKSPACE_CONFIG"], environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]) == (":4096:8", "0")


@pytest.mark.parametrize("allocator", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_is_set_stays(allocator: str) -> None:
    environ = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        allocator: "max_split_size_mb:64",
        "TRITON_CACHE_DIR": "/mine",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1",
    }
    before = dict(environ)
    assert settle_environment(tensor=2, context=1, memory_beside=True, deterministic=True, environ=environ) == {}
    assert environ == before


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = local_cache_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert local_cache_folder() is None
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    assert local_cache_folder() is None
    environ: dict[str, str] = {}
    assert "TRITON_CACHE_DIR" not in settle_environment(
        **queues_of([RunConfig()]), deterministic=False, environ=environ
    )


def test_a_gpu_that_cannot_be_shared_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(**_: int) -> None:
        raise RuntimeError("Green context is only supported on CUDA 12.8+!\nat aten")

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr("torch.cuda.green_contexts.GreenContext.create", create)
    with pytest.raises(
        ValueError, match=r"gradient_sm_share is 0\.5, .*only supported on CUDA 12\.8\+!\): use a build"
    ):
        context_of_share(torch.device("cuda", 0), 0.5)
