"""Launches of one memory layer, and of norms and heads of one block, on a rank for a microbatch; and the bytes that they
must move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from kernels.common.device_bytes import SECTOR_BYTES
from kernels.common.ids import bytes_per_id
from kernels.common.rounding import Rounding
from kernels.common.tables import row_dtype
from lab.bench.static.builds import Launch, launcher, recorded
from lab.bench.static.reads import Reads
from megamem.memory_config import MemoryConfig
from megamem.retrieval.config import ProductKeyConfig, RetrievalConfig, TuckerConfig
from parallel.layout import coefficients_per_rank
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ROW_WISE, has_bf16_gradients, keeps_rows, table_update
from pretrain.errors import ConfigError
from pretrain.planning.costs.stages import Division
from pretrain.planning.costs.timing import TimePart
from tools.ranks import fewest_ranks


@dataclass(frozen=True)
class Access:
    """Accesses to one tensor.

    Attributes:
        tensor_bytes: all of it.
        item_bytes: of one access; 0: it is streamed, once.
        reads: of the items, where they are rows of a table.
        count: accesses in any order, where they are none.
        once: whether a row is met once, however often it is read.
    """

    tensor_bytes: int
    item_bytes: int = 0
    reads: Reads | None = None
    count: int = 0
    once: bool = False


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        op: its name, and what for.
        part: of a plan's time that it belongs to; None: no plan counts it.
        is_forward: whether it is of a forward pass, which recomputation repeats.
        launches: of kernels.
        accesses: that it cannot do without.
        reads: of the table that it reads or adds to; None: it has none.
    """

    op: str
    part: TimePart | None
    is_forward: bool
    launches: tuple[Launch, ...]
    accesses: tuple[Access, ...]
    reads: Reads | None


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def calls_of(config: RunConfig, exponent: float, num_tokens: int | None = None) -> list[Call]:
    """The calls of the first memory layer's forward and backward pass, of an update by row of its bank, and of a norm and
    the heads of a block.

    Args:
        config: of a model with a memory that retrieves.
        exponent: of Zipf's law by which rows are read; 0: evenly.
        num_tokens: of a rank; None: those of its microbatch.

    Raises:
        ConfigError: the model has no such memory.
    """
    memory = config.model.memory
    if not isinstance(memory, RetrievalConfig):
        what = "no memory" if memory is None else f"a memory of kind {memory.kind}, which retrieves nothing"
        raise ConfigError(f"{config.name} has {what}: name a configuration whose memory retrieves rows")
    tokens = num_tokens or Division.of(config, fewest_ranks(config.parallel)).rank_tokens
    calls = [*_backbone(config, tokens), *_selection(config, memory, tokens), *_shuffle(config, memory, tokens)]
    layout, of_group = config.parallel, config.parallel.memory * tokens
    num_rows = config.model.memory_plan.views[0].num_bank_rows // layout.memory_rows
    tables = _Tables(
        reads=Reads(num_rows, of_group * memory.lookup.rows // layout.memory_rows, exponent),
        tokens=of_group,
        rows_per_token=memory.lookup.rows,
        scores=coefficients_per_rank(memory.lookup.scores, layout.memory_columns),
        bins=memory.lookup.bins,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        gradient_dtype=torch.bfloat16 if has_bf16_gradients(config.optimizer) else torch.float32,
    )
    for table in memory.tables:
        width = table.width // layout.memory_columns
        calls += tables.summed(width) if table.name == "values" else tables.multiplied(width)
    if table_update(config.optimizer) is ROW_WISE:
        for table in memory.tables:
            calls += tables.updated(
                table.name, table.width // layout.memory_columns, by_row=keeps_rows(config.optimizer)
            )
    return calls


def _backbone(config: RunConfig, tokens: int) -> list[Call]:
    from kernels.rms_norm import triton_op as norm
    from kernels.rotated_heads import triton_op as heads

    model, tensor = config.model, config.parallel.tensor
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    x, gain = _empty(tokens, model.hidden_size, dtype=dtype), _empty(model.hidden_size, dtype=dtype)
    scales = _empty(tokens, dtype=torch.float32)
    normed = recorded(lambda: launcher(norm._rms_norm)(x, gain, model.norm_epsilon))
    of_normed = recorded(lambda: launcher(norm._gradients)(x, x, gain, scales))
    width, groups = model.attention_head_dim, max(1, (model.num_query_groups or model.num_attention_heads) // tensor)
    per_group = max(1, model.num_attention_heads // tensor // groups)
    product = _empty(tokens, 1, groups, (per_group + 2) * width, dtype=dtype)
    query, key, _ = product.split([per_group * width, width, width], 3)
    query = query.reshape(tokens, 1, groups * per_group, width)
    turns = _empty(tokens, 1, 2, model.rotary_width, dtype=torch.float32)
    gains = 2 * [_empty(width, dtype=dtype) if model.qk_norm else None]
    turned = [_empty(*each.shape, dtype=dtype) for each in (query, key)]
    of_heads = _empty(tokens * (groups * per_group + groups) if model.qk_norm else 0, dtype=torch.float32)
    turning = recorded(lambda: launcher(heads._rotated_heads)(query, key, turns, *gains, model.norm_epsilon))
    turning_back = recorded(lambda: launcher(heads._gradients)(*turned, query, key, turns, *gains, of_heads))
    from kernels.swiglu import triton_op as activation

    halves = _empty(tokens, 2 * max(1, model.ffn_hidden_size // tensor), dtype=dtype)
    active = _empty(tokens, halves.shape[1] // 2, dtype=dtype)
    activated = recorded(lambda: launcher(activation._swiglu)(halves))
    of_halves = recorded(lambda: launcher(activation._gradient)(halves, active))
    wide, narrow = Access(_bytes(halves)), Access(_bytes(active))
    row, both, table = Access(_bytes(x)), Access(_bytes(query) + _bytes(key)), Access(_bytes(turns) // 2)
    again = [both] if model.qk_norm else []
    return [
        Call("rms_norm", None, True, tuple(normed), (row, row, Access(_bytes(scales))), None),
        Call("rms_norm, gradients", None, False, tuple(of_normed), (row, row, row, Access(_bytes(scales))), None),
        Call("rotated_heads", None, True, tuple(turning), (both, both, table, Access(_bytes(of_heads))), None),
        Call("rotated_heads, gradients", None, False, tuple(turning_back), (both, both, *again, table), None),
        Call("swiglu", None, True, tuple(activated), (wide, narrow), None),
        Call("swiglu, gradients", None, False, tuple(of_halves), (wide, wide, narrow), None),
    ]


def _selection(config: RunConfig, memory: MemoryConfig, tokens: int) -> list[Call]:
    view = config.model.memory_plan.views[0]
    assert isinstance(memory, RetrievalConfig)
    kept, keys = (memory.row_top_k, memory.top_k), memory.expansion * view.num_keys
    heads = memory.num_heads
    if isinstance(memory, TuckerConfig):
        from kernels.tucker_topk import triton_op as tucker

        # Layers hand products on as they are.
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        scores = _empty(2, memory.tucker_rank, tokens, heads, keys, dtype=dtype)
        rows, columns = scores.permute(0, 2, 3, 4, 1).unbind(0)
        core = _empty(heads, memory.tucker_rank, memory.tucker_rank, dtype=torch.float32)
        launches = recorded(lambda: launcher(tucker.tucker_topk)(rows, columns, core, core[:, 0], core[:, 1], *kept))
        op = "tucker_topk"
    elif isinstance(memory, ProductKeyConfig):
        from kernels.product_topk import triton_op as product

        scores = _empty(2, tokens, heads, keys, dtype=torch.float32)
        launches = recorded(lambda: launcher(product.product_topk)(scores[0], scores[1], *kept))
        op = "product_topk"
    else:
        return []
    ids = 2 * 8 * tokens * heads * (memory.row_top_k + memory.top_k)
    selected = Call(op, TimePart.MEMORY_SELECTION, True, tuple(launches), (Access(_bytes(scores)), Access(ids)), None)
    return [selected, *(_kept_scores(memory, scores) if isinstance(memory, TuckerConfig) else [])]


def _kept_scores(memory: TuckerConfig, scores: Tensor) -> list[Call]:
    """Scores of what is kept, of products [2, R, T, H, N], and their gradients."""
    from kernels.tucker_scores import triton_op as tucker

    tokens, heads, rank = scores.shape[2], memory.num_heads, memory.tucker_rank
    cores = _empty(memory.num_cores, heads, rank, rank, dtype=torch.float32)
    entries, read = _empty(2, tokens, heads, memory.top_k), scores.permute(0, 2, 3, 4, 1)
    kept = _empty(2, rank, tokens, heads, memory.top_k, dtype=scores.dtype)
    out = _empty(tokens, heads, memory.top_k, memory.num_cores, dtype=torch.float32)
    where = list(read.shape), list(read.stride())
    forward = recorded(lambda: launcher(tucker._scores)(read, cores, entries))
    backward = recorded(lambda: launcher(tucker._gradients)(kept, cores, entries, out, *where))
    sectors = Access(SECTOR_BYTES * kept.numel())
    ids, results, copies = Access(_bytes(entries)), Access(_bytes(out)), Access(_bytes(kept))
    return [
        Call("tucker_scores", None, True, tuple(forward), (ids, sectors, copies, results), None),
        Call(
            "tucker_scores, gradients",
            None,
            False,
            tuple(backward),
            (ids, copies, results, Access(_bytes(scores)), sectors),
            None,
        ),
    ]


def _shuffle(config: RunConfig, memory: MemoryConfig, tokens: int) -> list[Call]:
    if not isinstance(memory, TuckerConfig) or memory.shuffle != "keyed":
        return []
    from kernels.shuffled_rows import triton_op as shuffled

    view = config.model.memory_plan.views[0]
    entries = _empty(tokens, memory.lookup.rows)
    grid = memory.expansion * view.num_keys, (2**62, 2**62 + 1, 5, 2**63 - 1)
    window = view.num_rows, view.first_row, view.num_bank_rows
    with_blocks = memory.num_value_projections > 1
    launches = recorded(lambda: launcher(shuffled._shuffled_rows)(entries, *grid, *window, with_blocks))
    written = bytes_per_id(view.num_bank_rows) * (1 + with_blocks)
    streamed = Access(_bytes(entries) + written * entries.numel())
    return [Call("shuffled_rows", None, True, tuple(launches), (streamed,), None)]


@dataclass(frozen=True)
class _Tables:
    """Lookups of all tokens of a memory group in a rank's rows and columns.

    Attributes:
        reads: of its rows, alike in all parts of them.
        tokens: of the group.
        rows_per_token: wherever these are.
        scores: coefficients of an entry.
        bins: sums of a token.
        dtype: of tables and activations.
        gradient_dtype: of gradients of tables.
    """

    reads: Reads
    tokens: int
    rows_per_token: int
    scores: int
    bins: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    def summed(self, width: int) -> list[Call]:
        """A table whose rows are summed: forward, the gradients of its coefficients, and its own."""
        ids, coef, out = self._ids(), self._coef(self.scores), _empty(self.tokens, self.bins * width, dtype=self.dtype)
        bins = self._ids() if self.bins > 1 else None
        moved = [ids, coef, out, *([] if bins is None else [bins])]
        return [
            self._gather("gather_sum, values", width, (ids, coef, bins, self.bins), moved, is_forward=True),
            self._gather("gather_dot, gradient of coefficients", width, (ids, out, self.scores, bins), moved),
            self._accumulate("segment_accumulate, values", width, coef, out, bins),
        ]

    def multiplied(self, width: int) -> list[Call]:
        """A table whose rows are multiplied with a vector: forward, the vector's gradient, and its own."""
        ids, coef, x = self._ids(), self._coef(1), _empty(self.tokens, width, dtype=self.dtype)
        moved = [ids, coef, x]
        return [
            self._gather("gather_dot, pre-values", width, (ids, x, 1, None), moved, is_forward=True),
            self._gather("gather_sum, gradient of input", width, (ids, coef, None, 1), moved),
            self._accumulate("segment_accumulate, pre-values", width, coef, x, None),
        ]

    def updated(self, name: str, width: int, *, by_row: bool) -> list[Call]:
        """An update by row, of all rows or of those that were read."""
        from kernels.row_squares import triton_op as squares
        from kernels.row_update import triton_op as update
        from kernels.segment_accumulate.op import numbers_of

        table = _empty(self.reads.num_rows, width, dtype=self.dtype)
        num = min(self.reads.num_rows, self.reads.num_entries) if by_row else self.reads.num_rows
        gradient, factors = _empty(num, width, dtype=self.gradient_dtype), _empty(num, dtype=torch.float32)
        rows = _empty(num) if by_row else None
        rounding = numbers_of(Rounding(2**62) if self.dtype == torch.bfloat16 else None)
        part = TimePart.MEMORY_UPDATE
        summed = recorded(lambda: launcher(squares._row_squares)(gradient))
        moved = recorded(lambda: launcher(update._row_update)(table, gradient, factors, 1.0, rounding, rows, None))
        read = [Access(_bytes(gradient)), Access(_bytes(factors))]
        written = 2 * [Access(num * width * table.element_size())] + [Access(0 if rows is None else _bytes(rows))]
        return [
            Call(f"row_squares, {name}", part, False, tuple(summed), tuple(read), None),
            Call(f"row_update, {name}", part, False, tuple(moved), (*read, *written), None),
        ]

    def _ids(self) -> Tensor:
        return _empty(self.tokens, self.rows_per_token, dtype=row_dtype(self.reads.num_rows))

    def _coef(self, scores: int) -> Tensor:
        return _empty(self.tokens, self.rows_per_token, scores, dtype=self.dtype)

    def _gather(
        self,
        what: str,
        width: int,
        operands: tuple[object, ...],
        moved: Sequence[Tensor],
        *,
        is_forward: bool = False,
    ) -> Call:
        op = what.partition(",")[0]
        table = _empty(self.reads.num_rows, width, dtype=self.dtype)
        function = launcher(getattr(import_module(f"kernels.{op}.triton_op"), op))
        launches = recorded(lambda: function(table, *operands))
        rows = Access(_bytes(table), width * table.element_size(), self.reads)
        streams = [Access(_bytes(each)) for each in moved]
        return Call(what, TimePart.MEMORY_GATHERS, is_forward, tuple(launches), (rows, *streams), self.reads)

    def _accumulate(self, what: str, width: int, coef: Tensor, vec: Tensor, bins: Tensor | None) -> Call:
        from kernels.segment_accumulate import triton_op
        from kernels.segment_accumulate.op import numbers_of

        gradient = _empty(self.reads.num_rows, width, dtype=self.gradient_dtype)
        rounding = numbers_of(Rounding(2**62) if self.gradient_dtype == torch.bfloat16 else None)
        order = triton_op.sort_by_row(self._ids(), gradient.shape[0])
        function = launcher(triton_op._segment_accumulate)
        launches = recorded(lambda: function(gradient, *order, coef, vec, bins, rounding))
        row = Access(_bytes(gradient), gradient.element_size() * width, self.reads, once=True)
        entries, element = self.reads.num_entries, coef.element_size()
        random = [
            Access(_bytes(vec), width * element, count=entries),
            Access(_bytes(coef), coef.shape[2] * element, count=entries),
        ]
        # A row is read and written; what the sort found of them is streamed.
        sorted_rows, places, *cuts = order
        found = entries * (sorted_rows.element_size() + places.element_size()) + sum(_bytes(each) for each in cuts)
        accesses = (row, row, *random, Access(found))
        return Call(what, TimePart.MEMORY_GRADIENTS, False, tuple(launches), accesses, self.reads)
