"""Lines on what a machine has and lacks, with the fix; and nothing that works is complained of."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import processor
from tools import cli, doctor

Disk = namedtuple("Disk", "free")


def by_name(look) -> dict[str, doctor.DoctorLine]:
    found = list(look())
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_this_machine_has_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "Nothing is lacking." in said
    assert f"\nok     megatron-core: {version('megatron-core')}\n" in said
    assert "lacks" not in said


def test_a_package_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_version(name: str) -> str:
        if name in ("numpy", "wandb"):
            raise doctor.PackageNotFoundError(name)
        return {"torch": "2.5.1", "triton": "3.2"}.get(name, original(name))

    original = doctor.version
    monkeypatch.setattr(doctor, "version", found_version)
    found = by_name(doctor.look_at_packages)
    assert (found["torch"].state, found["torch"].text) == ("lacks", "2.5.1, outside of <2.14,>=2.11")
    assert found["torch"].fix == 'pip install "torch<2.14,>=2.11"'
    assert (found["numpy"].state, found["numpy"].text) == ("lacks", "not installed")
    assert (found["triton"].state, found["triton"].fix) == ("note", 'pip install "megamem[gpu]"')
    assert found["wandb"].state == "note"
    assert found["wandb"].fix == 'pip install "megamem[tracking]", if you want that'
    assert "ruff" not in found, "of use to those who change the code alone"


def test_sources_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found_requires(name: str) -> list[str]:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", found_requires)
    finding = by_name(doctor.look_at_packages)["megamem"]
    assert finding.state == "lacks"
    assert "not installed" in finding.text
    assert "pip install -e ." in finding.fix


def test_every_extra_that_a_run_can_use_is_looked_at() -> None:
    names = {Path(line.split('"')[1]).name for line in doctor.requires("megamem") or [] if "extra ==" in line}
    assert set(doctor._FOR) <= names


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doctor, "why_gpus_are_unusable", lambda: "the driver is too old")
    found = by_name(doctor.look_at_gpus)
    assert found["GPUs"].state == "lacks"
    assert found["GPUs"].text == "2 visible, and unusable: the driver is too old"
    monkeypatch.setattr(doctor, "why_gpus_are_unusable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="H100", total_memory=80e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    found = by_name(doctor.look_at_gpus)
    assert found["GPU 1"].text == "H100, 80 GB, compute capability 9.0"
    assert found["links"].state == "note"
    assert found["NCCL"].text == "2.27.3"


def test_kernels_without_a_compiler_or_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAMEM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor, "local_cache_folder", lambda: None)
    found = by_name(doctor.look_at_kernels)
    assert (found["kernels on CPUs"].state, found["kernels on CPUs"].fix) == ("note", "install g++")
    assert found["folder of compiled kernels"].state == "lacks"
    assert found["folder of Triton's kernels"].fix.startswith("set TRITON_CACHE_DIR")


def test_limits_that_are_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(64e6))
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: False)
    found = by_name(doctor.look_at_limits)
    for name in ("file handles", "shared memory", "locked memory", "clock"):
        assert found[name].state == "note", name
        assert found[name].fix, name
    limits[resource.RLIMIT_NOFILE] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert by_name(doctor.look_at_limits)["file handles"].text == "as many as wanted"


@pytest.mark.parametrize(("load", "state"), [(3.9, "ok"), (4.0, "note")])
def test_other_work(monkeypatch: pytest.MonkeyPatch, load: float, state: str) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)
    found = by_name(doctor.look_at_limits)["other work"]
    assert (found.state, bool(found.fix)) == (state, state == "note")
    assert found.text == f"a load of {load} on 8 cores in the last minute"


@pytest.mark.parametrize(
    ("flags", "gpus", "precision", "state"),
    [
        ("flags\t: fpu avx512_bf16", "", "bf16", "note"),
        ("flags\t: fpu avx512_bf16", "", "fp32", "ok"),
        ("flags\t: fpu avx512_bf16", "0", "bf16", "ok"),
        ("flags\t: fpu amx_bf16 amx_tile", "", "bf16", "ok"),
        ("Features\t: fp asimd bf16 bti", "", "bf16", "ok"),
        ("Features\t: fp asimd", "", "bf16", "note"),
    ],
)
def test_bf16_on_cores_that_are_slow_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, gpus: str, precision: str, state: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: A CPU\n{flags}\n")
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    assert processor.processor_name() == "A CPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(doctor, "check_stages", lambda *_, **__: None)
    configuration = tmp_path / "a.yaml"
    configuration.write_text(f"train: {{precision: {precision}}}\ndata: {{datasets: [{{path: nowhere}}]}}")
    found = doctor.look_at_config(str(configuration), [], 1)
    assert (found.state, found.text.startswith("can run here on 1 rank")) == (state, True)
    assert bool(found.fix) == (state == "note")
    is_fast = "bf16" in flags.replace("avx512_bf16", "")
    assert ("faster than in fp32" in by_name(doctor.look_at_limits)["bf16 on CPUs"].text) == is_fast


def test_a_configuration_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {num_steps: 7}\ndata: {datasets: [{path: nowhere}]}")
    assert cli.main(["doctor", str(path)]) == 2
    said = capsys.readouterr().out
    assert f"lacks  {path}: cannot run here\n       -> {Path('nowhere').absolute()}: no such data set." in said
    assert said.endswith("1 thing to mend.\n")
    assert cli.main(["doctor", "--ranks", "2"]) == 2
    assert "name one, or leave --ranks out" in capsys.readouterr().err
