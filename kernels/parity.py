"""Check an implementation of the kernels against its twins: outputs, every gradient, selections, updates, and the loss.

Run by the tests on every implementation and device, and by the benchmark before it reports a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.select import Kernels, implementation_of

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Largest error over the largest element of the reference, which the twins compute from the same inputs in float64."""


@dataclass(frozen=True)
class ParityShape:
    """One comparison."""

    rows: int
    tokens: int
    reads: int
    width: int
    groups: int = 1
    bins: int = 1


PARITY_SHAPES = (
    # A shard of 24 columns; rows that are read many times.
    ParityShape(rows=7, tokens=9, reads=5, width=24),
    # Two cores; a width that is no power of two.
    ParityShape(rows=50, tokens=4, reads=33, width=96, groups=2),
    # Several sums per token.
    ParityShape(rows=50, tokens=3, reads=18, width=40, groups=2, bins=3),
    # One row for all: the longest run that there can be, with partial sums.
    ParityShape(rows=1, tokens=11, reads=13, width=8),
    # One token; wider than a tile.
    ParityShape(rows=300, tokens=1, reads=40, width=1288),
    # Nothing to do.
    ParityShape(rows=5, tokens=0, reads=3, width=16),
)


@dataclass(frozen=True)
class SelectionShape:
    """One selection; with `levels` above 0 that many distinct scores per unit, so that equal ones decide."""

    tokens: int
    heads: int
    keys: int
    row_top_k: int
    top_k: int
    levels: int = 0


SELECTION_SHAPES = (
    SelectionShape(tokens=3, heads=2, keys=33, row_top_k=5, top_k=7),
    SelectionShape(tokens=2, heads=1, keys=100, row_top_k=33, top_k=80, levels=2),
    # The largest of the papers.
    SelectionShape(tokens=1, heads=1, keys=150, row_top_k=128, top_k=768, levels=8),
    SelectionShape(tokens=0, heads=1, keys=20, row_top_k=5, top_k=7),
)


def parity_problems(kernels: Kernels, device: torch.device | str, dtype: torch.dtype) -> Iterator[str]:
    """Differences from the twins, which run on the CPU, in words; none if all is well. Tables are of this dtype."""
    for shape in PARITY_SHAPES:
        for case in _cases(shape, dtype):
            actual = _outcome(getattr(kernels, case.op), case, device)
            reference = _outcome(implementation_of(case.op, "naive"), case, None)
            for part, expected in reference.items():
                error = _relative_error(actual[part], expected)
                # A table's gradient is a sum of products of inputs, made in fp32 whatever the table is.
                tolerance = TOLERANCE[torch.float32 if part == "main_grad" else dtype]
                if not error <= tolerance:
                    off = f"off by {error:.1e} of its largest element, more than {tolerance:.0e}"
                    yield f"{case.op} {shape} {dtype}: {part} is {off}"


def selection_problems(kernels: Kernels, device: torch.device | str) -> Iterator[str]:
    """Differences of a selection of fp32 scores from its twin, in words: entries, their order, their scores, and the
    rows behind them."""
    for shape in SELECTION_SHAPES:
        g = torch.Generator().manual_seed(0)
        scores = torch.randn(2, 2, shape.tokens, shape.heads, shape.keys, generator=g)
        core, directions = torch.rand(shape.heads, 2, 2, generator=g), torch.rand(2, shape.heads, 2, generator=g)
        if shape.levels:
            scores = (scores * shape.levels).round() / shape.levels
        # With the strides that the layers give them.
        rows, columns = scores.permute(0, 2, 3, 4, 1).unbind(0)
        sizes = (shape.row_top_k, shape.top_k)
        for op, operands in {
            "tucker_topk": (rows, columns, core, *directions),
            "product_topk": (rows[..., 0], columns[..., 0]),
        }.items():
            actual = getattr(kernels, op)(*(tensor.to(device) for tensor in operands), *sizes)
            reference = implementation_of(op, "naive")(*operands, *sizes)
            yield from _differences(f"{op} {shape}", ("first stage", "entries"), actual, reference)
        kept = torch.randint(0, shape.keys, (2, shape.tokens, shape.heads, shape.top_k), generator=g)
        cores = torch.rand(3, shape.heads, 2, 2, generator=g)
        found = kernels.tucker_scores(torch.stack((rows, columns)).to(device), cores.to(device), kept.to(device))
        of_twin = implementation_of("tucker_scores", "naive")(
            torch.stack((rows, columns)).double(), cores.double(), kept
        )
        if not (error := _relative_error(found.cpu(), of_twin)) <= TOLERANCE[torch.float32]:
            yield f"tucker_scores {shape}: off by {error:.1e} of its largest element"
        entries = torch.randint(0, shape.keys**2, (shape.tokens, shape.top_k), generator=g)
        # Four virtual blocks, and a window that wraps around the bank.
        num_rows = max(1, shape.keys**2 // 4)
        where = (shape.keys, (5, 2**62 + 1, 2**63 - 1, 7), num_rows, num_rows // 2, num_rows + 1, True)
        actual = kernels.shuffled_rows(entries.to(device), *where)
        reference = implementation_of("shuffled_rows", "naive")(entries, *where)
        yield from _differences(f"shuffled_rows {shape}", ("rows", "blocks"), actual, reference)


HASH_SHAPES = ((4, 700, 1, 1), (3, 300, 4, 2), (5, 1, 2, 1), (2, 0, 3, 1))
"""Tokens of the longest n-gram, tokens of a sequence, sequences, and the stretches that sequences are held in."""


def hash_problems(kernels: Kernels, device: torch.device | str) -> Iterator[str]:
    """Differences of hashes of n-grams from the twin's, in words, over ids of which many are boundaries."""
    for max_order, num_tokens, num_sequences, num_stretches in HASH_SHAPES:
        g = torch.Generator().manual_seed(max_order)
        ids = torch.randint(0, 6, (num_stretches * (max_order - 1) + num_tokens, num_sequences), generator=g)
        positions = torch.randint(0, 7, (num_sequences, num_tokens), generator=g).t()
        # Hashes are of all orders, and have negative sums.
        multipliers = torch.randint(-(2**62), 2**62, (max_order + 1, max_order), generator=g)
        moduli, offsets = torch.randint(1, 2**40, (2, max_order + 1, 3), generator=g)
        orders = torch.arange(max_order + 1).clamp(min=2, max=max_order)
        operands = (ids, positions, multipliers, moduli, offsets, orders, torch.tensor(3), torch.tensor(2))
        for rules in (("sum", False, None), ("sum", True, 5), ("xor", True, None), ("xor", False, 2**33)):
            hashes_of: Any = kernels.ngram_hashes
            actual = hashes_of(*(each.to(device) for each in operands), *rules)
            reference = implementation_of("ngram_hashes", "naive")(*operands, *rules)
            name = f"ngram_hashes {max_order, num_tokens, num_sequences, num_stretches} {rules}"
            yield from _differences(name, ("hashes",), (actual,), (reference,))


def update_problems(kernels: Kernels, device: torch.device | str) -> Iterator[str]:
    """Bits of updates by row that are not their twins', in words: of the first rows and of some, which stay or move."""
    g = torch.Generator().manual_seed(0)
    for width in (24, 240, 1288):
        for dtype in (torch.float32, torch.bfloat16):
            weights, gradient = torch.randn(40, width, generator=g).to(dtype), torch.randn(20, width, generator=g)
            factors = torch.randn(20, generator=g) * (torch.arange(20) % 3 > 0)
            rounding = None if dtype == torch.float32 else Rounding(2**62 + 5, 2**33, 3)
            name = f"[20, {width}] {dtype}"
            squares = kernels.row_squares(gradient.to(device)), implementation_of("row_squares", "naive")(gradient)
            yield from _differences(f"row_squares {name}", ("sums",), squares[:1], squares[1:])
            for rows, keep in ((None, 0.9), (torch.randperm(40, generator=g)[:20], 1.0)):
                actual, reference = weights.to(device, copy=True), weights.clone()
                there = None if rows is None else rows.to(device)
                kernels.row_update(actual, gradient.to(device), factors.to(device), keep, rounding, there)
                implementation_of("row_update", "naive")(reference, gradient, factors, keep, rounding, rows)
                yield from _differences(f"row_update {name}", ("weights",), (actual,), (reference,))


@dataclass(frozen=True)
class HeadsShape:
    """Heads of tokens of sequences, [s, b, n or g, d], of which the first r columns turn."""

    s: int
    b: int
    n: int
    g: int
    d: int
    r: int


HEADS_SHAPES = (
    # As shipped; grouped heads of a width that is no power of two, of which some columns turn; one token.
    HeadsShape(s=300, b=2, n=12, g=12, d=64, r=64),
    HeadsShape(s=9, b=3, n=6, g=2, d=40, r=24),
    HeadsShape(s=1, b=1, n=2, g=1, d=16, r=16),
)
STREAM_SHAPES = ((70, 4, 1280), (9, 3, 77), (1, 1, 8), (0, 2, 16))
"""Tokens, residual streams, and their columns: as shipped, sides that are no power of two, one token, and none."""
_ROUNDINGS = 3
"""Roundings of heads by PyTorch's operations, one after the other."""


def backbone_problems(kernels: Kernels, device: torch.device | str, dtype: torch.dtype) -> Iterator[str]:
    """Differences of norms and of turned heads from their twins in words: results, and every gradient."""
    for shape in HEADS_SHAPES:
        g = torch.Generator().manual_seed(0)
        product = torch.randn(shape.s, shape.b, shape.n + shape.g, shape.d, generator=g).to(dtype)
        gains = torch.randn(2, shape.d, generator=g).to(dtype)
        angles = torch.randn(shape.s, 1, 1, shape.r // 2, generator=g).repeat(1, 1, 1, 2)
        turns = torch.cat((angles.cos(), angles.sin()), 2)

        def normed(op: Any, product: Tensor, gains: Tensor, turns: Tensor) -> tuple[Tensor, ...]:
            return (op(product, gains[0], 1e-5),)

        def turned(op: Any, product: Tensor, gains: Tensor, turns: Tensor, n: int = shape.n) -> tuple[Tensor, ...]:
            query, key = product[:, :, :n], product[:, :, n:]
            return *op(query, key, turns, *gains, 1e-5), *op(query, key, turns, None, None, 0.0)

        calls: dict[str, Callable[..., tuple[Tensor, ...]]] = {"rms_norm": normed, "rotated_heads": turned}
        for op, call in calls.items():
            given = [each.to(device, copy=True).requires_grad_() for each in (product, gains)]
            wide = [each.double().requires_grad_() for each in (product, gains)]
            out = call(getattr(kernels, op), *given, turns.to(device))
            expected = call(implementation_of(op, "naive"), *wide, turns)
            actual = [*out, *torch.autograd.grad([each.sin().sum() for each in out], given)]
            upstream = [each.detach().cpu().double().cos() for each in out]
            reference = [*expected, *torch.autograd.grad(expected, wide, upstream)]
            for part, (ours, twins) in enumerate(zip(actual, reference, strict=True)):
                if not (error := _relative_error(ours.detach().cpu(), twins.detach())) <= _ROUNDINGS * TOLERANCE[dtype]:
                    yield f"{op} {shape} {dtype}: result or gradient {part} is off by {error:.1e} of its largest element"


def stream_problems(kernels: Kernels, device: torch.device | str, dtype: torch.dtype) -> Iterator[str]:
    """Differences of what is done to residual streams from the twins in words: results, and every gradient.

    Streams are of this dtype, and their weights in fp32.
    """
    for num_tokens, n, width in STREAM_SHAPES:
        g = torch.Generator().manual_seed(n)
        streams, out = (torch.randn(num_tokens, *each, width, generator=g).to(dtype) for each in ((n,), ()))
        post, mix = (torch.randn(num_tokens, n, *each, generator=g) for each in ((), (n,)))
        maps, each_maps = torch.randn(n * n + 2 * n, n * width, generator=g), torch.randn(n + 2, width, generator=g)
        cases: tuple[tuple[str, tuple[Tensor, ...], tuple[Any, ...]], ...] = (
            ("doubly_stochastic", (mix,), (20, 1e-6)),
            ("mix_streams", (streams, out, post, mix), ()),
            ("mix_streams", (streams, out, post), (None,)),
            ("weigh_streams", (streams, post), ()),
            ("normal_product", (streams.flatten(1), maps), (1e-6,)),
            ("normal_product", (streams, each_maps), (1e-6, True)),
        )
        for op, operands, rest in cases:
            given = [each.to(device, copy=True).requires_grad_() for each in operands]
            wide = [each.double().requires_grad_() for each in operands]
            out, expected = getattr(kernels, op)(*given, *rest), implementation_of(op, "naive")(*wide, *rest)
            upstream = torch.randn(out.shape, generator=g).to(out.dtype)
            actual = [out, *torch.autograd.grad(out, given, upstream.to(device))]
            reference = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
            for part, (ours, twins) in enumerate(zip(actual, reference, strict=True)):
                if not (error := _relative_error(ours.detach().cpu(), twins.detach())) <= TOLERANCE[ours.dtype]:
                    where = f"{num_tokens} tokens of {n} streams of {width}, {dtype}"
                    yield f"{op} {where}: result or gradient {part} is off by {error:.1e} of its largest element"


def loss_problems(kernels: Kernels, device: torch.device | str, dtype: torch.dtype) -> Iterator[str]:
    """Differences of the loss's ops from their twins, in words; none if all is well. Logits are of this dtype."""
    for num_tokens, num_ids in ((3, 7), (2, 4104), (1, 5001)):
        g = torch.Generator().manual_seed(num_ids)
        logits = (5 * torch.randn(num_tokens, num_ids, generator=g)).to(dtype)
        # One of another rank, and ids that are ruled out.
        places = torch.randint(0, num_ids, (num_tokens,), generator=g) + num_ids * (torch.arange(num_tokens) == 1)
        logits[0, : num_ids // 2] = -torch.inf
        places[0], scale = num_ids - 1, torch.randn(num_tokens, generator=g)
        sums = implementation_of("softmax_sums", "naive")(logits.double(), places)
        of_twin = implementation_of("softmax_gradient", "naive")(logits.double(), places, *sums[:2], scale.double())
        found = kernels.softmax_sums(logits.to(device, copy=True), places.to(device))
        operands = (places.to(device), *found[:2], scale.to(device))
        gradient = kernels.softmax_gradient(logits.to(device, copy=True), *operands)
        name = f"[{num_tokens}, {num_ids}] {dtype}"
        for op, part, actual, expected, tolerance in (
            *(
                ("softmax_sums", part, *pair, TOLERANCE[torch.float32])
                for part, *pair in zip(("top", "total", "target"), found, sums, strict=True)
            ),
            ("softmax_gradient", "gradient", gradient, of_twin, TOLERANCE[dtype]),
        ):
            if not (error := _relative_error(actual.cpu(), expected)) <= tolerance:
                yield f"{op} {name}: {part} is off by {error:.1e} of its largest element, more than {tolerance:.0e}"


def _differences(name: str, parts: Sequence[str], actual: Sequence[Any], reference: Sequence[Any]) -> Iterator[str]:
    """Tensors whose bits are not the twin's, in words."""
    for part, ours, twins in zip(parts, actual, reference, strict=True):
        if not torch.equal(ours.cpu(), twins):
            yield f"{name}: {part} differ from the twin's"


@dataclass(frozen=True)
class _Case:
    """One op at one shape.

    Attributes:
        table, ids, operand, rest: its arguments, in this order.
        gradient: gradient of its result.
    """

    op: str
    table: Tensor
    ids: Tensor
    operand: Tensor
    rest: tuple[Any, ...]
    gradient: Tensor


def _cases(shape: ParityShape, dtype: torch.dtype) -> Iterator[_Case]:
    g = torch.Generator().manual_seed(0)
    tokens, reads, wide, num_bins = shape.tokens, shape.reads, shape.bins * shape.width, shape.bins

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype)

    # As wide as layers give them.
    ids = torch.randint(0, shape.rows, (tokens, reads), generator=g, dtype=torch.int32)
    bins = torch.randint(0, num_bins, (tokens, reads), generator=g, dtype=torch.int32) if num_bins > 1 else None
    table, coef, grad_sum = normal(shape.rows, shape.width), normal(tokens, reads, shape.groups), normal(tokens, wide)
    vectors, grad_dot = normal(tokens, wide), normal(tokens, reads, shape.groups)
    yield _Case("gather_sum", table, ids, coef, (bins, num_bins), grad_sum)
    yield _Case("gather_dot", table, ids, vectors, (shape.groups, bins), grad_dot)


def _outcome(op: Callable[..., Tensor], case: _Case, device: torch.device | str | None) -> dict[str, Tensor]:
    """Output, gradient of the operand, and the table's `main_grad`; without a device those of the twin."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.double() if device is None else tensor.to(device)

    table = torch.nn.Parameter(moved(case.table))
    if device is not None:
        table.main_grad = torch.zeros_like(table, dtype=torch.float32)  # type: ignore[attr-defined]
    operand = moved(case.operand).detach().clone().requires_grad_()
    ids, *rest = (each.to(device or "cpu") if isinstance(each, Tensor) else each for each in (case.ids, *case.rest))
    out = op(table, ids, operand, *rest)
    out.backward(moved(case.gradient))
    added = table.grad if device is None else table.main_grad  # type: ignore[attr-defined]
    assert isinstance(added, Tensor)
    assert operand.grad is not None
    found = {"out": out.detach(), "gradient of the operand": operand.grad, "main_grad": added}
    return {name: tensor.cpu() for name, tensor in found.items()}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
