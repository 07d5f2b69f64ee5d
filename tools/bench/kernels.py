"""`megamem bench kernels`: the memory kernels beside PyTorch's own operations, the speed of a copy, and the products of retrieval.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError, UserError
from tools.bench import retrieval as retrieval_measures

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.gather_pair.op import GatherPair
    from kernels.select import Kernels

_COPY_BYTES = 1 << 28
# Rows that calls in turn read are this many bytes apart in time, so that they come from memory and not from a cache.
_COLD_BYTES = 1 << 28
_MAX_ID_SETS = 256


@dataclass(frozen=True)
class KernelShape:
    """A table and how a token reads it."""

    name: str
    rows: int
    width: int
    reads: int
    groups: int
    pre_width: int
    """Columns of the pre-values that are read by the same rows; 0 where ranks share them, which read no pairs."""


# Of the UltraMemV2 paper (configs/ultramemv2): values of the 227M and 1B models, and a shard of the 120B model's.
SHAPES = (
    KernelShape("227m", rows=648_000, width=192, reads=32, groups=2, pre_width=192),
    KernelShape("1b", rows=2_437_632, width=768, reads=128, groups=2, pre_width=384),
    KernelShape("shard", rows=8_000_000, width=24, reads=256, groups=2, pre_width=0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `megamem bench kernels` alone reads."""
    options = parser.add_argument_group("megamem bench kernels")
    options.add_argument(
        "--shapes",
        nargs="+",
        choices=[shape.name for shape in SHAPES],
        metavar="NAME",
        help="tables and retrievals of models: 227m, 1b, shard (default: 227m)",
    )
    options.add_argument(
        "--tokens", nargs="+", type=int, metavar="N", help="tokens per call (default: 1 2048; 32768 too on a GPU)"
    )
    options.add_argument("--rows", type=int, metavar="N", help="rows of the table, instead of the shape's own")
    options.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], help="of the table (default: both)")
    options.add_argument(
        "--kernels",
        choices=("auto", "triton", "cpu", "torch"),
        help="implementation, as for train.kernels (default: auto)",
    )
    options.add_argument(
        "--compile-naive", action="store_true", help="also time the naive twin under torch.compile (minutes on a CPU)"
    )


KERNEL_OPTIONS = ("shapes", "tokens", "rows", "dtypes", "kernels", "compile_naive")


def run_kernel_bench(args: argparse.Namespace) -> int:
    """Checks parity, measures and prints.

    Raises:
        ConfigError: the options cannot work here.
        UserError: the kernels are wrong: there are no figures then.
    """
    import torch

    from kernels.implementations import KernelUnavailableError, describe
    from kernels.parity import parity_problems, selection_problems
    from kernels.select import select_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (args.rows is not None and args.rows < 1) or any(tokens < 1 for tokens in args.tokens or []):
        raise ConfigError("nothing to measure: --rows and --tokens must be at least 1")
    try:
        kernels = select_kernels(args.kernels or "auto", device_type=device.type)
    except KernelUnavailableError as error:
        raise ConfigError(f"--kernels is {args.kernels}: {error}") from error
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    names = args.dtypes or list(dtypes)
    problems = [problem for name in names for problem in parity_problems(kernels, device, dtypes[name])]
    problems += selection_problems(kernels, device)
    if problems:
        raise UserError("no figures, because the kernels are wrong here: " + "; ".join(problems))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"memory kernels {describe(kernels.implementations)}, torch {torch.__version__}, {where}; equal to their naive twins"
    )
    print(
        f"least time of {args.rounds} rounds, in turns; GB/s of the bytes that must move, and their share of the copy's; "
        f"of retrieval, the ratio to the time of the products of queries and keys"
    )
    default_tokens = [1, 2048] if device.type == "cpu" else [1, 64, 2048, 32768]
    for shape in (shape for shape in SHAPES if shape.name in (args.shapes or ["227m"])):
        for name in names:
            for tokens in args.tokens or default_tokens:
                for spread in ("uniform", "zipf"):
                    _report(shape, args.rows or shape.rows, name, dtypes[name], tokens, spread, kernels, device, args)
                for retrieval in retrieval_measures.RETRIEVALS[shape.name]:
                    found = retrieval_measures.contenders(retrieval, dtypes[name], tokens, kernels, device)
                    seconds = least_seconds(found, args.rounds, device)
                    print("\n".join(retrieval_measures.lines(retrieval, name, tokens, seconds)))
    return 0


def draw_ids(rows: int, tokens: int, reads: int, spread: str, device: torch.device) -> Tensor:
    """[T, J]: uniform, or with the frequency of the n-th row falling as 1/n, the frequent ones all over the table."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    if spread == "uniform":
        return torch.randint(0, rows, (tokens, reads), generator=generator, device=device)
    # The logarithm of a rank is uniform if its frequency is its inverse.
    uniform = torch.rand(tokens, reads, generator=generator, device=device, dtype=torch.float64)
    rank = (torch.tensor(float(rows), dtype=torch.float64) ** uniform).long().clamp_(1, rows) - 1
    return rank * 2_147_483_647 % rows


def _report(
    shape: KernelShape,
    rows: int,
    dtype_name: str,
    dtype: torch.dtype,
    tokens: int,
    spread: str,
    kernels: Kernels,
    device: torch.device,
    args: argparse.Namespace,
) -> None:
    contenders, num_bytes = _contenders(shape, rows, dtype, tokens, spread, kernels, device, args.compile_naive)
    seconds = least_seconds(contenders, args.rounds, device)
    copy = num_bytes["copy"] / seconds["copy"]
    print(f"\n{shape.name}: {rows:,} x {shape.width} {dtype_name}, {tokens} tokens x {shape.reads} rows, {spread}")
    for name, best in seconds.items():
        speed = num_bytes[name] / best
        print(f"  {name:50} {best * 1e3:10.3f} ms {speed / 1e9:9.1f} GB/s {speed / copy:6.0%}")


def _contenders(
    shape: KernelShape,
    rows: int,
    dtype: torch.dtype,
    tokens: int,
    spread: str,
    kernels: Kernels,
    device: torch.device,
    compile_naive: bool,
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What is timed, and the bytes that each must move."""
    import torch
    import torch.nn.functional as F

    from kernels.gather_sum import naive

    width, reads, groups = shape.width, shape.reads, shape.groups
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    table = torch.nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype).normal_(generator=generator))
    table.main_grad = torch.zeros(rows, width, device=device)  # type: ignore[attr-defined]
    dense = torch.nn.Parameter(table.detach())
    num_sets = min(_MAX_ID_SETS, 2 + _COLD_BYTES // (tokens * reads * width * table.element_size()))
    id_sets = draw_ids(rows, num_sets * tokens, reads, spread, device).view(num_sets, tokens, reads)
    # Each call reads other rows; and a new tensor of ids, so that no order of an earlier call is kept.
    next_ids = itertools.cycle(id_sets.unbind()).__next__
    coef, one_coef, x = normal(tokens, reads, groups), normal(tokens, reads), normal(tokens, width)
    grad_sum, grad_dot = normal(tokens, width), normal(tokens, reads, 1)
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def both(gather: Callable[..., Tensor], parameter: Tensor, operand: Tensor, gradient: Tensor) -> Callable[[], None]:
        leaf = operand.detach().clone().requires_grad_()

        def step() -> None:
            out = gather(parameter, next_ids().view(tokens, reads), leaf)
            leaf.grad = parameter.grad = None
            out.backward(gradient)

        return step

    def embedding_bag(parameter: Tensor, rows_read: Tensor, weights: Tensor) -> Tensor:
        return F.embedding_bag(rows_read, parameter, per_sample_weights=weights, mode="sum")

    def without_grad(function: Callable[..., Tensor], parameter: Tensor, operand: Tensor) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: function(parameter, next_ids(), operand))

    contenders: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "gather_sum": without_grad(kernels.gather_sum, table, coef),
        "gather_sum, one coefficient": without_grad(kernels.gather_sum, table, one_coef.unsqueeze(2)),
        "embedding_bag": without_grad(embedding_bag, dense, one_coef),
        "gather_dot": without_grad(kernels.gather_dot, table, x),
        "gather_sum, forward and backward": both(kernels.gather_sum, table, coef, grad_sum),
        "gather_dot, forward and backward": both(kernels.gather_dot, table, x, grad_dot),
        "embedding_bag, forward and backward": both(embedding_bag, dense, one_coef, grad_sum),
    }
    if compile_naive:
        twin = torch.compile(naive.gather_sum)
        contenders["naive, compiled"] = without_grad(twin, dense, coef)
        contenders["naive, compiled, forward and backward"] = both(twin, dense, coef, grad_sum)
    element = table.element_size()
    entries = tokens * reads
    forward, backward = _least_bytes(entries, tokens, element, groups, width)
    pair_forward, pair_backward = _least_bytes(entries, tokens, element, groups, width + shape.pre_width)
    pairs: dict[str, Callable[[], Any]] = {}
    if shape.pre_width:
        pre_values = torch.nn.Parameter(normal(rows, shape.pre_width))
        pre_values.main_grad = torch.zeros(rows, shape.pre_width, device=device)  # type: ignore[attr-defined]
        x_of_pair = normal(tokens, shape.pre_width)
        pairs = _pair_contenders(kernels, (pre_values, table), next_ids, (x_of_pair, coef), grad_sum)
    num_bytes = {name: forward + backward * ("backward" in name) for name in contenders}
    num_bytes |= {name: pair_forward + pair_backward * ("backward" in name) for name in pairs}
    return contenders | pairs, {**num_bytes, "copy": 2 * _COPY_BYTES}


def _pair_contenders(
    kernels: Kernels,
    tables: tuple[Tensor, Tensor],
    next_ids: Callable[[], Tensor],
    operands: tuple[Tensor, Tensor],
    gradient: Tensor,
) -> dict[str, Callable[[], Any]]:
    """Pre-values and values read by the same rows: the pair, and the two gathers one after the other."""
    import torch

    from kernels.gather_pair.weighting import weighted

    def both(pair: GatherPair) -> Callable[[], None]:
        x, scores = (operand.detach().clone().requires_grad_() for operand in operands)

        def step() -> None:
            out = pair(*tables, next_ids().view(gradient.shape[0], -1), x, scores)
            for leaf in (x, scores, *tables):
                leaf.grad = None
            out.backward(gradient)

        return step

    def forward(pair: GatherPair) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: pair(*tables, next_ids(), *operands))

    def in_turn(pre_values: Tensor, values: Tensor, ids: Tensor, x: Tensor, scores: Tensor) -> Tensor:
        products = kernels.gather_dot(pre_values, ids, x).squeeze(2)
        return kernels.gather_sum(values, ids, weighted(scores, products, "none"))

    return {
        "gather_pair": forward(kernels.gather_pair),
        "gather_dot, then gather_sum": forward(in_turn),
        "gather_pair, forward and backward": both(kernels.gather_pair),
        "gather_dot, then gather_sum, forward and backward": both(in_turn),
    }


def _least_bytes(entries: int, tokens: int, element: int, groups: int, width: int) -> tuple[int, int]:
    """Bytes that a gather must move in forward, and in backward: rows of `width` columns in all tables that are read by the same ids."""
    forward = entries * (width * element + 8 + element * groups) + tokens * width * element
    # Backward: the other gather, and reading and writing fp32 rows of the accumulator.
    return forward, forward + entries * (8 * width + 8) + tokens * width * element


def least_seconds(contenders: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """The least time of each, measured in turns after one call that is not counted."""
    for function in contenders.values():
        function()
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in contenders.items():
            least[name] = min(least[name], _seconds(function, device))
    return least


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    import torch

    if device.type == "cpu":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    # The one wait, and outside of what is measured.
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def unread_options(args: argparse.Namespace) -> Iterator[str]:
    """Options of the kernels' benchmark that were given."""
    for name in KERNEL_OPTIONS:
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}"
