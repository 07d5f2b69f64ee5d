"""Lookups of layers that share tables, added up after the last of a backward pass, beside a pass that adds each at once."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from kernels.common import joined_lookups
from kernels.common.joined_lookups import Lookup
from kernels.common.main_grad import MainGradient
from kernels.common.rounding import Rounding
from kernels.common.row_gradient import RowGradient
from kernels.common.table_gradient import give_gradient, gradient_of
from kernels.select import Kernels
from tests.rotation import in_rotation
from tests.unit.kernels.cases import assert_close, is_interpreted, main_grad_table
from tests.unit.kernels.test_kernels_main_grad import sorts_from_now_on

ROWS, WIDTH, TOKENS = 11, 6, 2
# Rows that each layer reads per token: the third is of another form than those around it.
READS = (4, 4, 3, 5, 5)


class Layers:
    """Layers that read one bank's values and pre-values, each by ids of its own."""

    def __init__(self, kernels: Kernels, *, wait: bool, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(1)
        self.kernels = kernels
        self.tables = [main_grad_table(torch.randn(ROWS, WIDTH, generator=g).to(dtype)) for _ in range(2)]
        self.ids = [torch.randint(0, ROWS, (TOKENS, reads), generator=g) for reads in READS]
        self.x = [torch.randn(TOKENS, WIDTH, generator=g).to(dtype) for _ in READS]
        if wait:
            for table in self.tables:
                gradient = MainGradient(table)
                gradient.wait_for_last_lookup()
                give_gradient(table, gradient)

    def out(self, layer: int) -> Tensor:
        """A layer's output, [T, W]."""
        values, pre_values = self.tables
        scores = self.kernels.gather_dot(pre_values, self.ids[layer], self.x[layer])
        return self.kernels.gather_sum(values, self.ids[layer], scores.tanh())

    def backward(self) -> None:
        """A pass through all layers."""
        torch.stack([self.out(layer) for layer in range(len(READS))]).square().sum().backward()

    def gradients(self) -> list[Tensor]:
        return [table.main_grad for table in self.tables]  # type: ignore[attr-defined]


def assert_same(kernels: Kernels, actual: list[Tensor], expected: list[Tensor]) -> None:
    """In C++ and PyTorch entries are added one by one, and so to the bit."""
    for one, other in zip(actual, expected, strict=True):
        if is_interpreted(kernels):
            assert_close(one, other.double(), torch.float32)
        else:
            assert torch.equal(one, other)
        assert one.any()


def test_gradients_are_those_of_lookups_that_do_not_wait(kernels: Kernels) -> None:
    waiting, others = Layers(kernels, wait=True), Layers(kernels, wait=False)
    for _ in range(2):
        waiting.backward()
        others.backward()
        assert_same(kernels, waiting.gradients(), others.gradients())


def test_lookups_of_one_form_take_one_sort_for_both_tables(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = sorts_from_now_on(kernels, monkeypatch)
    Layers(kernels, wait=True).backward()
    assert len(sorts) == 3
    Layers(kernels, wait=False).backward()
    assert len(sorts) == 3 + len(READS)


@pytest.mark.parametrize(("most", "num_sorts"), in_rotation([(15, 5), (16, 4), (22, 3)]))
def test_no_more_entries_are_joined_than_may_be(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, most: int, num_sorts: int
) -> None:
    """The first two layers have 16 entries, the last two 20."""
    sorts = sorts_from_now_on(kernels, monkeypatch)
    monkeypatch.setattr(joined_lookups, "MOST_JOINED_ENTRIES", most)
    waiting, others = Layers(kernels, wait=True), Layers(kernels, wait=False)
    waiting.backward()
    assert len(sorts) == num_sorts
    others.backward()
    assert_same(kernels, waiting.gradients(), others.gradients())


def test_a_block_that_is_computed_again_is_a_pass_of_its_own(kernels: Kernels) -> None:
    waiting, others = Layers(kernels, wait=True), Layers(kernels, wait=False)
    for layers in (waiting, others):
        out = torch.zeros(TOKENS, WIDTH, requires_grad=True)
        for block in ((0, 1), (2, 3), (4,)):
            out = checkpoint(
                lambda x, layers=layers, block=block: x + sum(layers.out(layer) for layer in block),
                out,
                use_reentrant=True,
            )
        out.square().sum().backward()
    assert_same(kernels, waiting.gradients(), others.gradients())


class CountedRoundings:
    """Roundings that say how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> Rounding:
        self.taken += 1
        return Rounding(self.taken, 0, 0)


def test_lookups_that_are_joined_are_rounded_once(kernels: Kernels) -> None:
    layers, exact = Layers(kernels, wait=True, dtype=torch.bfloat16), Layers(kernels, wait=False, dtype=torch.bfloat16)
    roundings = CountedRoundings()
    for table in layers.tables:
        table.main_grad = table.main_grad.bfloat16()  # type: ignore[attr-defined]
        gradient = gradient_of(table) or MainGradient(table)
        assert isinstance(gradient, MainGradient)
        gradient.roundings = roundings
        give_gradient(table, gradient)
    layers.backward()
    exact.backward()
    assert roundings.taken == 2 * 3
    for rounded, sums in zip(layers.gradients(), exact.gradients(), strict=True):
        assert (rounded.float() - sums).abs().max() <= 3 * 2.0**-7 * sums.abs().max()


@pytest.mark.parametrize(("bins", "reads", "num_sums"), in_rotation([(1, 3, 1), (2, 4, 1), (2, 3, 4), (3, 3, 4)], 2))
def test_rows_of_a_step_are_added_up_in_as_few_groups_as_vectors_allow(
    kernels: Kernels, bins: int, reads: int, num_sums: int
) -> None:
    """Lookups whose entries have hardly fewer vectors than entries stay apart."""
    g = torch.Generator().manual_seed(2)
    calls = []

    def accumulate(gradient: Tensor, ids: Tensor, *operands: Tensor | None) -> None:
        calls.append(ids.shape)
        kernels.segment_accumulate(gradient, ids, *operands)

    gradient, dense = RowGradient(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    for tokens in (3, 1, 4, 2):
        ids = torch.randint(0, ROWS, (tokens, reads), generator=g)
        coef, vec = torch.randn(tokens, reads, 2, generator=g), torch.randn(tokens, bins * WIDTH, generator=g)
        of_entries = None if bins == 1 else torch.randint(0, bins, (tokens, reads), generator=g)
        gradient.add(Lookup(accumulate, ids, coef, vec, of_entries))
        kernels.segment_accumulate(dense, ids, coef, vec, of_entries)
    RowGradient.add_up([gradient])
    assert len(calls) == num_sums
    assert gradient.read is not None
    assert gradient.sums is not None
    sums = torch.zeros_like(dense).index_copy_(0, gradient.read.rows, gradient.sums[: len(gradient.read.rows)])
    assert_same(kernels, [sums], [dense])


@pytest.mark.parametrize("by_row", [False, True])
def test_lookups_that_wait_keep_no_graph(kernels: Kernels, by_row: bool) -> None:
    """A graph would hold the message of a pipeline stage, and its gradient, until the last backward pass of a step."""
    layers = Layers(kernels, wait=not by_row)
    if by_row:
        for table in layers.tables:
            give_gradient(table, RowGradient(ROWS, WIDTH))
    received = torch.ones(TOKENS, WIDTH, requires_grad=True)
    left, layers.x[0] = weakref.ref(received), received * layers.x[0]
    layers.out(0).square().sum().backward()
    layers.x.clear()
    del received
    assert left() is None


def test_lookups_of_steps_wait_for_the_one_that_is_due(kernels: Kernels) -> None:
    """A step that is not applied adds nothing, and takes nothing away."""

    def added_up(steps: str) -> Tensor:
        """Sums behind steps of a lookup each: `w` waits, `s` is skipped, `u` is due."""
        g = torch.Generator().manual_seed(2)
        gradient = RowGradient(ROWS, WIDTH)
        for number, step in enumerate(steps):
            gradient.begin_step(is_due=step == "u")
            lookup = Lookup(
                kernels.segment_accumulate,
                torch.randint(0, ROWS, (3, 2), generator=g),
                torch.randn(3, 2, 1, generator=g),
                torch.randn(3, WIDTH, generator=g),
                None,
            )
            if step != " ":
                gradient.add(lookup)
                gradient.count(torch.tensor(10**number, dtype=torch.int32))
            if step == "w":
                gradient.wait()
        RowGradient.add_up([gradient])
        assert gradient.read is not None
        assert gradient.sums is not None
        assert gradient.num_tokens == sum(10**number for number, step in enumerate(steps) if step in "wu")
        return torch.zeros(ROWS, WIDTH).index_copy_(0, gradient.read.rows, gradient.sums[: len(gradient.read.rows)])

    assert torch.equal(added_up("wswu"), added_up("w wu"))
    assert not torch.equal(added_up("wwwu"), added_up("w wu"))


def test_a_table_is_not_kept_by_its_lookups() -> None:
    """A cycle would hold its memory until Python looks for cycles."""
    table = Parameter(torch.zeros(2, 3))
    gradient = MainGradient(table)
    gradient.wait_for_last_lookup()
    give_gradient(table, gradient)
    del gradient
    gone = weakref.ref(table)
    del table
    assert gone() is None
