"""`megamem bench kernels` as a command: its figures, its refusals, and that it reports nothing of kernels that are
wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import select
from kernels.implementations import automatic
from lab.bench import kernels as bench
from lab.bench import retrieval
from lab.bench.kernels import draw_ids
from lab.bench.retrieval import RETRIEVALS, _unordered_tucker
from megamem.retrieval.config import TuckerConfig
from pretrain.config.stages import load_config
from pretrain.errors import ConfigError, UserError
from tools.cli import build_parser, main

REPOSITORY = Path(__file__).parents[3]
SMALL = ["bench", "kernels", "--rows", "500", "--tokens", "3", "--rounds", "1"]


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


@pytest.mark.parametrize("implementation", ["torch", "auto"])
def test_it_reports_every_contender(implementation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--kernels", implementation, "--dtypes", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "equal to their naive twins" in out
    assert re.search(r"227m: 500 x 192 bf16, 3 tokens x 32 rows, zipf", out)
    timed = ("copy", "gather_sum", "gather_dot", "embedding_bag")
    for name in (*timed, "gather_sum, forward and backward", "gather_dot, forward and backward"):
        assert len(re.findall(rf"^  {name} +[0-9.]+ ms +[0-9.]+ GB/s +[0-9]+%$", out, re.MULTILINE)) == 2
    for model, selection, size in (
        ("ultramemv2", "tucker_topk", "1 heads x 804"),
        ("memory_plus", "product_topk", "2 heads x 1138"),
    ):
        assert f"{model}/227m_1.2b: {selection}, bf16 products, 3 tokens x {size} keys per side" in out
        chosen = automatic("cpu") if implementation == "auto" else implementation
        for name in {f"key scores, then {selection}, {chosen}", f"{selection}, {chosen}", f"{selection}, torch"}:
            assert len(re.findall(rf"^  {name} +[0-9.]+ ms +[0-9.]+x$", out, re.MULTILINE)) == 1
    assert len(re.findall(r"^  key scores +[0-9.]+ ms +1.00x +[0-9.]+ TFLOP/s$", out, re.MULTILINE)) == 2


def test_products_in_bf16_are_selected_as_widened_ones() -> None:
    """As a GPU hands them on."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = (torch.randn(3, 2, 8, 2, generator=generator).bfloat16() for _ in range(2))
    weights = tuple(torch.randn(2, *size, generator=generator) for size in ((2, 2), (2,), (2,)))
    narrow, wide = (
        _unordered_tucker(*sides, *weights, 4, 3) for sides in ((rows, columns), (rows.float(), columns.float()))
    )
    assert all(torch.equal(ours, widened) for ours, widened in zip(narrow, wide, strict=True))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install "megamem[gpu]"'
)
def test_triton_kernels_are_reported_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton's interpreter runs them where there is no GPU, over few keys: it takes a minute for those of the models. Their
    parity, which takes half a minute, is asked of all implementations in `test_kernels_parity.py`."""
    for name in [name for name in vars(bench) if name.endswith("_problems")]:
        monkeypatch.setattr(bench, name, lambda *_: [])
    few = tuple(replace(case, keys=40, row_top_k=8, top_k=8) for case in RETRIEVALS["227m"])
    monkeypatch.setattr(retrieval, "RETRIEVALS", {"227m": few})
    assert main([*SMALL, "--tokens", "1", "--kernels", "triton", "--dtypes", "fp32"]) == 0
    out = capsys.readouterr().out
    for selection in ("tucker_topk", "product_topk"):
        for implementation in ("triton", "torch"):
            assert len(re.findall(rf"^  {selection}, {implementation} +[0-9.]+ ms +[0-9.]+x$", out, re.MULTILINE)) == 1


def test_retrievals_are_those_of_the_models() -> None:
    for case in itertools.chain(*RETRIEVALS.values()):
        model = load_config(REPOSITORY / "configs" / f"{case.model}.yaml").model
        memory = model.memory
        assert memory is not None
        assert case.keys == memory.expansion * memory.plan(model.num_layers).views[0].num_keys
        assert case.selection == ("tucker_topk" if isinstance(memory, TuckerConfig) else "product_topk")
        assert (case.key_dim, case.heads, case.row_top_k, case.top_k) == (
            memory.key_dim,
            memory.num_heads,
            memory.row_top_k,
            memory.top_k,
        )
        assert case.rank == (memory.tucker_rank if isinstance(memory, TuckerConfig) else 0)


def test_wrong_selections_get_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's entries in another order."""
    good = select.select_kernels("torch")

    def reversed_entries(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stage_ids, retrieved = good.product_topk(*args)
        return stage_ids, retrieved.flip(3)

    monkeypatch.setattr(select, "select_kernels", lambda *a, **k: replace(good, product_topk=reversed_entries))
    args = parsed(*SMALL)
    with pytest.raises(UserError, match="no figures, because the kernels are wrong here: product_topk"):
        args.func(args)


def test_wrong_kernels_get_no_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = select.select_kernels

    def broken(*args: Any, **kwargs: Any) -> select.Kernels:
        good = original("torch")
        return replace(good, gather_dot=lambda *a, **k: -good.gather_dot(*a, **k))

    monkeypatch.setattr(select, "select_kernels", broken)
    args = parsed(*SMALL)
    with pytest.raises(UserError, match="no figures, because the kernels are wrong here: gather_dot"):
        args.func(args)
    assert "GB/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "kernels", "--rows", "0"], "--rows and --tokens must be at least 1"),
        (["bench", "kernels", "--rounds", "0"], "--rounds is 0: nothing is measured with less than 1"),
    ],
)
def test_options_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    args = parsed(*words)
    with pytest.raises(ConfigError, match=re.escape(message)):
        args.func(args)


def test_options_of_the_others_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["bench", "a.yaml", "--tokens", "3"],
        ["bench", "step", "a.yaml", "--rows", "3"],
        ["bench", "a.yaml", "--pair"],
    ):
        with pytest.raises(SystemExit):
            parsed(*words)
        assert "unrecognized arguments: " in capsys.readouterr().err


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
