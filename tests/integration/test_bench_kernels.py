"""`megamem bench kernels` as a command: its figures, its refusals, and that it reports nothing of kernels that are wrong."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import select
from pretrain.errors import ConfigError, UserError
from tools.cli import build_parser, main
from tools.kernel_bench import draw_ids

SMALL = ["bench", "kernels", "--rows", "500", "--tokens", "3", "--rounds", "1"]


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


@pytest.mark.parametrize("implementation", ["torch", "auto"])
def test_it_reports_every_contender(implementation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--kernels", implementation, "--dtypes", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "equal to their naive twins" in out
    assert re.search(r"227m: 500 x 192 bf16, 3 tokens x 32 rows, zipf", out)
    for name in ("copy", "gather_sum", "gather_dot", "embedding_bag", "gather_sum, forward and backward"):
        assert len(re.findall(rf"^  {name} +[0-9.]+ ms +[0-9.]+ GB/s +[0-9]+%$", out, re.MULTILINE)) == 2


def test_wrong_kernels_get_no_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = select.select_kernels

    def broken(*args: Any, **kwargs: Any) -> select.Kernels:
        kernels = original("torch")
        return replace(kernels, gather_dot=lambda *a, **k: -kernels.gather_dot(*a, **k))

    monkeypatch.setattr(select, "select_kernels", broken)
    args = parsed(*SMALL)
    with pytest.raises(UserError, match="no figures, because the kernels are wrong here: gather_dot"):
        args.func(args)
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "configs/quickstart.yaml", "--tokens", "3"], "--tokens has no effect without `kernels`"),
        (["bench", "kernels", "--rows", "0"], "--rows and --tokens must be at least 1"),
        (["bench", "kernels", "--rounds", "0"], "--rounds of at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    args = parsed(*words)
    with pytest.raises(ConfigError, match=re.escape(message)):
        args.func(args)


def test_zipf_rows_are_zipf_distributed() -> None:
    """A row's share falls as the inverse of its rank: each doubling of the ranks holds as much as the last."""
    rows = 1 << 12
    ids = draw_ids(rows, 4096, 64, "zipf", torch.device("cpu"))
    assert ids.min() >= 0
    assert ids.max() < rows
    counts = ids.flatten().bincount(minlength=rows).sort(descending=True).values.double()
    octaves = torch.stack([counts[2**k - 1 : 2 ** (k + 1) - 1].sum() for k in range(11)]) / counts.sum()
    assert octaves[3:].min() > 0.9 / 12
    assert octaves[3:].max() < 1.1 / 12
    uniform = draw_ids(rows, 4096, 64, "uniform", torch.device("cpu")).flatten().bincount(minlength=rows)
    assert uniform.max() < 3 * uniform.double().mean()
