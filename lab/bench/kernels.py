"""`megamem bench kernels`: the memory kernels beside PyTorch's own operations and a copy, and retrieval.

Legend: R table rows, T tokens, J rows read per token, C coefficient groups, W columns.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import select
from kernels.common.tables import row_dtype
from kernels.gather_sum import naive
from kernels.implementations import KernelUnavailableError, describe
from kernels.parity import (
    backbone_problems,
    hash_problems,
    loss_problems,
    parity_problems,
    selection_problems,
    stream_problems,
    update_problems,
)
from kernels.select import Kernels
from lab.bench import retrieval
from pretrain.errors import ConfigError, UserError

_COPY_BYTES = 1 << 28
# Calls read this many bytes before they read the same rows again, so that rows come from memory and not from a cache.
_COLD_BYTES = 1 << 28
_MAX_ID_SETS = 256
# C, of every model here.
_GROUPS = 2
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class KernelShape:
    """A table and how a token reads it.

    Attributes:
        rows: R.
        width: W.
        reads: J.
    """

    rows: int
    width: int
    reads: int


# Shapes of UltraMemV2's paper (configs/ultramemv2): values of the 227M and 1B models, and a shard of the 120B model's.
SHAPES = {
    "227m": KernelShape(rows=648_000, width=192, reads=32),
    "1b": KernelShape(rows=2_437_632, width=768, reads=128),
    "shard": KernelShape(rows=8_000_000, width=24, reads=256),
}


def run_kernel_bench(args: argparse.Namespace) -> int:
    """Checks parity, measures and prints.

    Raises:
        ConfigError: the options cannot work here.
        UserError: the kernels are wrong: there are no figures then.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (args.rows is not None and args.rows < 1) or any(tokens < 1 for tokens in args.tokens or []):
        raise ConfigError("nothing to measure: --rows and --tokens must be at least 1")
    try:
        kernels = select.select_kernels(args.kernels or "auto", device_type=device.type)
    except KernelUnavailableError as error:
        raise ConfigError(f"--kernels is {args.kernels}: {error}") from error
    dtypes = args.dtypes or list(_DTYPES)
    problems = [problem for dtype in dtypes for problem in parity_problems(kernels, device, _DTYPES[dtype])]
    problems += [problem for dtype in dtypes for problem in backbone_problems(kernels, device, _DTYPES[dtype])]
    problems += [problem for dtype in dtypes for problem in stream_problems(kernels, device, _DTYPES[dtype])]
    problems += [problem for dtype in dtypes for problem in loss_problems(kernels, device, _DTYPES[dtype])]
    problems += selection_problems(kernels, device)
    problems += hash_problems(kernels, device)
    problems += update_problems(kernels, device)
    if problems:
        raise UserError("no figures, because the kernels are wrong here: " + "; ".join(problems))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    chosen = describe(kernels.implementations)
    print(f"memory kernels {chosen}, torch {torch.__version__}, {where}; equal to their naive twins")
    print(
        f"least time of {args.rounds} rounds, in turns; GB/s of the bytes that must move, and their share of the "
        "copy's; of retrieval, the ratio to the time of the products of queries and keys"
        + ("; milliseconds of the device, and what the host takes for a call" if device.type == "cuda" else "")
    )
    default_tokens = [1, 2048] if device.type == "cpu" else [1, 64, 2048, 32768]
    for name in (name for name in SHAPES if name in (args.shapes or ["227m"])):
        for dtype, tokens in itertools.product(dtypes, args.tokens or default_tokens):
            shape = replace(SHAPES[name], rows=args.rows or SHAPES[name].rows)
            for spread in ("uniform", "zipf"):
                print(
                    f"\n{name}: {shape.rows:,} x {shape.width} {dtype}, {tokens} tokens x {shape.reads} rows, {spread}"
                )
                contenders, num_bytes = _contenders(
                    shape, _DTYPES[dtype], tokens, spread, kernels, device, args.compile_naive
                )
                seconds = least_seconds(contenders, args.rounds, device)
                asked = host_seconds(contenders, args.rounds) if device.type == "cuda" else {}
                copy_speed = num_bytes["copy"] / seconds["copy"]
                for contender, best in seconds.items():
                    speed = num_bytes[contender] / best
                    host = f"   host {asked[contender] * 1e6:7.1f} us" if asked else ""
                    print(
                        f"  {contender:50} {best * 1e3:10.3f} ms {speed / 1e9:9.1f} GB/s {speed / copy_speed:6.0%}{host}"
                    )
            for case in retrieval.RETRIEVALS[name]:
                contenders = retrieval.contenders(case, _DTYPES[dtype], tokens, kernels, device)
                print(*retrieval.lines(case, dtype, tokens, least_seconds(contenders, args.rounds, device)), sep="\n")
    return 0


def draw_ids(rows: int, tokens: int, reads: int, spread: str, device: torch.device) -> Tensor:
    """Row ids [T, J]: uniform, or Zipf's (the n-th most frequent row is read 1/n as often as the first)."""
    generator = torch.Generator(device).manual_seed(0)
    if spread == "uniform":
        return torch.randint(0, rows, (tokens, reads), generator=generator, device=device)
    # The logarithm of a rank is uniform if its frequency is its inverse.
    uniform = torch.rand(tokens, reads, generator=generator, device=device, dtype=torch.float64)
    rank = (torch.tensor(float(rows), dtype=torch.float64) ** uniform).long().clamp_(1, rows) - 1
    return rank * 2_147_483_647 % rows


def _contenders(
    shape: KernelShape,
    dtype: torch.dtype,
    tokens: int,
    spread: str,
    kernels: Kernels,
    device: torch.device,
    compile_naive: bool,
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Operations to time, and the bytes that each must move."""
    width, reads = shape.width, shape.reads
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def embedding_bag(parameter: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.embedding_bag(ids, parameter, per_sample_weights=weights, mode="sum")

    table = torch.nn.Parameter(torch.empty(shape.rows, width, device=device, dtype=dtype).normal_(generator=generator))
    table.main_grad = torch.zeros(shape.rows, width, device=device)  # type: ignore[attr-defined]
    # The same weights, whose gradient is PyTorch's.
    dense = torch.nn.Parameter(table.detach())
    num_sets = min(_MAX_ID_SETS, 2 + _COLD_BYTES // (tokens * reads * width * table.element_size()))
    ids = draw_ids(shape.rows, num_sets * tokens, reads, spread, device)
    # In as many bits as banks have them.
    id_sets = ids.to(row_dtype(shape.rows)).view(num_sets, tokens, reads)
    # Each call reads other rows; and a new tensor of ids, so that no order of an earlier call is kept.
    next_ids = itertools.cycle(id_sets.unbind()).__next__
    coef, one_coef, x = normal(tokens, reads, _GROUPS), normal(tokens, reads), normal(tokens, width)
    grad_sum, grad_dot = normal(tokens, width), normal(tokens, reads, 1)
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    timed: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    num_bytes = {"copy": 2 * _COPY_BYTES}

    once, again = _least_bytes(tokens * reads, tokens, table.element_size(), width)

    def add(name: str, op: Callable[..., Tensor], read: Tensor, operand: Tensor, *, gradient: Tensor | None) -> None:
        """An op on a table, ids and an operand; and with its backward pass, given the gradient of its result."""
        leaf = operand.clone().requires_grad_()

        def both() -> None:
            out = op(read, next_ids().view(tokens, reads), leaf)
            leaf.grad = read.grad = None
            out.backward(gradient)

        timed[name], num_bytes[name] = torch.no_grad()(lambda: op(read, next_ids(), operand)), once
        if gradient is not None:
            in_both = f"{name}, forward and backward"
            timed[in_both], num_bytes[in_both] = both, once + again

    add("gather_sum", kernels.gather_sum, table, coef, gradient=grad_sum)
    add("gather_sum, one coefficient", kernels.gather_sum, table, one_coef.unsqueeze(2), gradient=None)
    # PyTorch has no gradient of its weights in bf16 on GPUs.
    lacks_gradient = device.type == "cuda" and dtype == torch.bfloat16
    add("embedding_bag", embedding_bag, dense, one_coef, gradient=None if lacks_gradient else grad_sum)
    add("gather_dot", kernels.gather_dot, table, x, gradient=grad_dot)
    if compile_naive:
        add("naive, compiled", torch.compile(naive.gather_sum), dense, coef, gradient=grad_sum)
    return timed, num_bytes


def _least_bytes(entries: int, tokens: int, element: int, width: int) -> tuple[int, int]:
    """Bytes that a gather must move in forward and in backward."""
    forward = entries * (width * element + 8 + element * _GROUPS) + tokens * width * element
    # Backward: the other gather, and reading and writing fp32 rows of the accumulator.
    return forward, forward + entries * (8 * width + 8) + tokens * width * element


def least_seconds(contenders: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """The least time of each, measured in turns after one call that is not counted.

    On a GPU it is the device's, of a graph of some calls: one call on an idle stream takes what the host takes to ask for
    it. A call that cannot be captured is timed as it is.
    """
    for function in contenders.values():
        function()
    timed = contenders if device.type == "cpu" else {name: _replayed(each) for name, each in contenders.items()}
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in timed.items():
            least[name] = min(least[name], _seconds(function, device))
    return {name: taken / getattr(timed[name], "num_calls", 1) for name, taken in least.items()}


def host_seconds(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least time that the host takes to ask a GPU for each."""
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, function in contenders.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            function()
            least[name] = min(least[name], time.perf_counter() - started)
    return least


_CALLS_OF_A_GRAPH = 8


@dataclass(frozen=True)
class _Replay:
    """A graph of some calls of an operation, each of which reads other rows."""

    graph: torch.cuda.CUDAGraph
    num_calls: int

    def __call__(self) -> None:
        self.graph.replay()


def _replayed(function: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(_CALLS_OF_A_GRAPH):
                function()
    except RuntimeError:
        # It waits for the host, as some of PyTorch's own operations do.
        torch.cuda.synchronize()
        return function
    return _Replay(graph, _CALLS_OF_A_GRAPH)


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
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
