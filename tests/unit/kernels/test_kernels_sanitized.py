"""The C++ kernels under the compiler's own checks: no byte outside of a tensor, and nothing that C++ leaves undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.costly import COSTLY
from tests.rotation import in_turn

pytestmark = COSTLY

ROOT = Path(__file__).parents[3]
FILES = (
    "test_kernels_accumulate.py",
    "test_kernels_bits.py",
    "test_kernels_gather.py",
    "test_kernels_main_grad.py",
    "test_kernels_offsets.py",
    "test_kernels_parity.py",
    "test_kernels_rounding.py",
    "test_kernels_row_parts.py",
    "test_kernels_updates.py",
    "test_ngram_hashes.py",
    "test_shuffled_rows.py",
    "test_topk.py",
)
WRITES_BESIDE_THE_RESULT = """
import torch
from kernels.gather_sum.op import cpu_gather_sum
table, ids, coef = torch.ones(4, 16), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3, 1)
cpu_gather_sum(table, ids, coef, torch.full((2, 3), 10_000, dtype=torch.int32), 2)
"""
"""A bin far beyond the two that there are, which the op's callers never ask for."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python whose C++ kernels are compiled with checks."""
    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("sanitized")
    if compiler is None:
        pytest.skip("g++ is not there")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}.so"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan", "libubsan")
    ]
    libraries = [Path(path.strip()) for path in found]
    if not all(path.is_absolute() for path in libraries):
        pytest.skip("g++ has no libasan and libubsan")
    wrapper = folder / "checking"
    wrapper.write_text(
        f'#!/bin/sh\nexec "{compiler}" -fsanitize=address,undefined -fno-sanitize-recover=all -g "$@" -O1\n'
    )
    wrapper.chmod(0o755)
    return {
        **os.environ,
        "CXX": str(wrapper),
        "MEGAMEM_CACHE_DIR": str(folder / "cache"),
        # Python itself is not compiled with checks, and keeps much to its end.
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )


@in_turn(0)
def test_a_planted_defect_is_found(checked: dict[str, str]) -> None:
    finished = run(checked, "-c", WRITES_BESIDE_THE_RESULT)
    assert finished.returncode != 0
    assert "AddressSanitizer" in finished.stderr
    assert "gather_sum" in finished.stderr


def test_kernels_stay_inside_of_their_tensors(checked: dict[str, str]) -> None:
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    finished = run(checked, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "0", "-k", "cpu", *files)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-6000:]
    assert " passed" in finished.stdout
