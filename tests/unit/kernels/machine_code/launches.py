"""Launches of one memory layer, and of norms and heads of one block, on a rank for a microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from kernels.common.rounding import Rounding
from kernels.common.tables import row_dtype
from megamem.config.memory import MemoryConfig
from megamem.retrieval.config import ProductKeyConfig, RetrievalConfig, TuckerConfig
from parallel.layout import coefficients_per_rank
from pretrain.config.schema import RunConfig
from pretrain.config.updates import ROW_WISE, has_bf16_gradients, keeps_rows, table_update
from pretrain.planning.counts.pipeline_stages import Division
from tests.unit.kernels.machine_code.builds import Launch, launcher, recorded
from tools.common.ranks import fewest_ranks


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches_of(config: RunConfig, num_tokens: int | None = None) -> list[Launch]:
    """Launches of the first memory layer's forward and backward pass, of an update by row of its bank, and of a norm and
    the heads of a block.

    Args:
        config: configuration of a model with a memory that retrieves.
        num_tokens: tokens of a rank; None: those of its microbatch.
    """
    memory = config.model.memory
    assert isinstance(memory, RetrievalConfig)
    tokens = num_tokens or Division.of(config, fewest_ranks(config.parallel)).rank_tokens
    found = [*_backbone(config, tokens), *_selection(config, memory, tokens), *_shuffle(config, memory, tokens)]
    layout, of_group = config.parallel, config.parallel.memory * tokens
    num_rows = config.model.memory_plan.views[0].num_bank_rows // layout.memory_rows
    tables = _Tables(
        num_rows=num_rows,
        num_entries=of_group * memory.lookup.rows // layout.memory_rows,
        tokens=of_group,
        rows_per_token=memory.lookup.rows,
        scores=coefficients_per_rank(memory.lookup.scores, layout.memory_columns),
        bins=memory.lookup.bins,
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        gradient_dtype=torch.bfloat16 if has_bf16_gradients(config.optimizer) else torch.float32,
    )
    for table in memory.tables:
        width = table.width // layout.memory_columns
        found += tables.summed(width) if table.name == "values" else tables.multiplied(width)
    if table_update(config.optimizer) is ROW_WISE:
        for table in memory.tables:
            found += tables.updated(table.width // layout.memory_columns, by_row=keeps_rows(config.optimizer))
    return found


def _backbone(config: RunConfig, tokens: int) -> list[Launch]:
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
    return [*normed, *of_normed, *turning, *turning_back, *activated, *of_halves]


def _selection(config: RunConfig, memory: MemoryConfig, tokens: int) -> list[Launch]:
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
    elif isinstance(memory, ProductKeyConfig):
        from kernels.product_topk import triton_op as product

        scores = _empty(2, tokens, heads, keys, dtype=torch.float32)
        launches = recorded(lambda: launcher(product.product_topk)(scores[0], scores[1], *kept))
    else:
        return []
    return [*launches, *(_kept_scores(memory, scores) if isinstance(memory, TuckerConfig) else [])]


def _kept_scores(memory: TuckerConfig, scores: Tensor) -> list[Launch]:
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
    return [*forward, *backward]


def _shuffle(config: RunConfig, memory: MemoryConfig, tokens: int) -> list[Launch]:
    if not isinstance(memory, TuckerConfig) or memory.shuffle != "keyed":
        return []
    from kernels.shuffled_rows import triton_op as shuffled

    view = config.model.memory_plan.views[0]
    entries = _empty(tokens, memory.lookup.rows)
    grid = memory.expansion * view.num_keys, (2**62, 2**62 + 1, 5, 2**63 - 1)
    window = view.num_rows, view.first_row, view.num_bank_rows
    with_blocks = memory.num_value_projections > 1
    return recorded(lambda: launcher(shuffled._shuffled_rows)(entries, *grid, *window, with_blocks))


@dataclass(frozen=True)
class _Tables:
    """Lookups of all tokens of a memory group in a rank's rows and columns.

    Attributes:
        num_rows: rows of a rank.
        num_entries: entries that the tokens read of them, about.
        tokens: tokens of the group.
        rows_per_token: wherever these are.
        scores: coefficients of an entry.
        bins: sums of a token.
        dtype: dtype of tables and activations.
        gradient_dtype: dtype of gradients of tables.
    """

    num_rows: int
    num_entries: int
    tokens: int
    rows_per_token: int
    scores: int
    bins: int
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    def summed(self, width: int) -> list[Launch]:
        """A table whose rows are summed: forward, the gradients of its coefficients, and its own."""
        ids, coef, out = self._ids(), self._coef(self.scores), _empty(self.tokens, self.bins * width, dtype=self.dtype)
        bins = self._ids() if self.bins > 1 else None
        return [
            *self._gather("gather_sum", width, ids, coef, bins, self.bins),
            *self._gather("gather_dot", width, ids, out, self.scores, bins),
            *self._accumulate(width, coef, out, bins),
        ]

    def multiplied(self, width: int) -> list[Launch]:
        """A table whose rows are multiplied with a vector: forward, the vector's gradient, and its own."""
        ids, coef, x = self._ids(), self._coef(1), _empty(self.tokens, width, dtype=self.dtype)
        return [
            *self._gather("gather_dot", width, ids, x, 1, None),
            *self._gather("gather_sum", width, ids, coef, None, 1),
            *self._accumulate(width, coef, x, None),
        ]

    def updated(self, width: int, *, by_row: bool) -> list[Launch]:
        """An update by row, of all rows or of those that were read."""
        from kernels.row_squares import triton_op as squares
        from kernels.row_update import triton_op as update
        from kernels.segment_accumulate.op import numbers_of

        table = _empty(self.num_rows, width, dtype=self.dtype)
        num = min(self.num_rows, self.num_entries) if by_row else self.num_rows
        gradient, factors = _empty(num, width, dtype=self.gradient_dtype), _empty(num, dtype=torch.float32)
        rows = _empty(num) if by_row else None
        rounding = numbers_of(Rounding(2**62) if self.dtype == torch.bfloat16 else None)
        summed = recorded(lambda: launcher(squares._row_squares)(gradient))
        moved = recorded(lambda: launcher(update._row_update)(table, gradient, factors, 1.0, rounding, rows, None))
        return [*summed, *moved]

    def _ids(self) -> Tensor:
        return _empty(self.tokens, self.rows_per_token, dtype=row_dtype(self.num_rows))

    def _coef(self, scores: int) -> Tensor:
        return _empty(self.tokens, self.rows_per_token, scores, dtype=self.dtype)

    def _gather(self, op: str, width: int, *operands: object) -> list[Launch]:
        table = _empty(self.num_rows, width, dtype=self.dtype)
        function = launcher(getattr(import_module(f"kernels.{op}.triton_op"), op))
        return recorded(lambda: function(table, *operands))

    def _accumulate(self, width: int, coef: Tensor, vec: Tensor, bins: Tensor | None) -> list[Launch]:
        from kernels.segment_accumulate import triton_op
        from kernels.segment_accumulate.op import numbers_of

        gradient = _empty(self.num_rows, width, dtype=self.gradient_dtype)
        rounding = numbers_of(Rounding(2**62) if self.gradient_dtype == torch.bfloat16 else None)
        order = triton_op.sort_by_row(self._ids(), gradient.shape[0])
        function = launcher(triton_op._segment_accumulate)
        return recorded(lambda: function(gradient, *order, coef, vec, bins, rounding))
