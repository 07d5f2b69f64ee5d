"""Parameters and operations of layers that retrieve, by closed formulas.

Legend: D hidden size, H heads, N keys per side, d key dim, R Tucker rank, C cores, K retrieved, V value dim, P
pre-value dim, B virtual blocks with a projection each, M rows (and columns) kept by the first selection stage.
"""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView
from megamem.retrieval.config import ProductKeyConfig, RetrievalConfig, TuckerConfig


def tucker_costs(memory: TuckerConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Tucker cores: d (Q D + 2 H N R + 2) + C H R^2 parameters of retrieval, Q queries; D (B V + P) of projections.

    The first stage reads R scores per key, and the candidate grid is M^2 products of R terms each behind the cores. For
    backward are kept the queries before and after their norm, the keys after theirs, the scores of the kept entries and
    their products with the cores, and for the balance of keys their probabilities; backward holds the gradients of all
    key scores twice, in fp32 and as those of the products.
    """
    width = model.hidden_size
    keys = memory.num_key_vectors(view)
    queries, entries = memory.num_queries * memory.key_dim, memory.num_heads * memory.top_k
    projections = width * (memory.num_value_projections * memory.value_dim + memory.pre_value_dim)
    weights = memory.num_queries * memory.key_dim * width + keys * memory.key_dim
    matrices = (
        (queries, width),
        (width, memory.num_value_projections * memory.value_dim),
        (memory.pre_value_dim, width),
    )
    return LayerCosts(
        matrices=matrices if memory.pre_value_dim else matrices[:2],
        retrieval=weights + 2 * memory.key_dim + memory.num_cores * memory.num_heads * memory.tucker_rank**2,
        projections=projections,
        key_flops=2.0 * weights,
        selection_flops=2.0 * (keys + memory.num_heads * memory.row_top_k**2 * memory.tucker_rank),
        projection_flops=2.0 * projections,
        selection_bytes=_selection_bytes(memory, keys),
        scored=keys,
        candidates=memory.num_heads * memory.row_top_k**2,
        compared=entries * memory.top_k,
        kept_wide=_balanced_keys(memory, keys // memory.tucker_rank),
        kept_narrow=2 * queries + entries * (memory.num_cores + 2 * memory.tucker_rank),
        kept_ids=2 * entries,
        kept_keys=keys * memory.key_dim,
        kept_by_entries=entries * (4 * memory.tucker_rank + 16),
        backward_wide=keys // 2,
    )


def product_key_costs(memory: ProductKeyConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Product keys: d (2 H D + 2 H N) parameters of retrieval and a gain; D V of the value projection, D of the gate.

    The candidate grid is M^2 sums. With biases every projection has one. For backward are kept the queries before
    and after their norm, the scores of the kept entries, and for the balance of keys their probabilities.
    """
    width = model.hidden_size
    entries = memory.num_heads * memory.top_k
    keys, queries = memory.num_key_vectors(view), memory.num_queries * memory.key_dim
    outputs = (width if memory.has_value_projection else 0) + (1 if memory.has_output_gate else 0)
    inputs = (memory.value_dim if memory.has_value_projection else 0) + (1 if memory.has_output_gate else 0)
    weights = queries * width + keys * memory.key_dim
    return LayerCosts(
        matrices=((queries, width), *(((width, memory.value_dim),) if memory.has_value_projection else ())),
        retrieval=weights + (memory.key_dim if memory.query_norm else 0) + (queries if memory.biases else 0),
        projections=width * inputs + (outputs if memory.biases else 0),
        key_flops=2.0 * weights,
        selection_flops=1.0 * memory.num_heads * memory.row_top_k**2,
        projection_flops=2.0 * width * inputs,
        selection_bytes=_selection_bytes(memory, keys),
        scored=keys,
        candidates=memory.num_heads * memory.row_top_k**2,
        compared=entries * memory.top_k,
        kept_wide=entries + _balanced_keys(memory, keys),
        kept_narrow=(2 if memory.query_norm else 1) * queries + entries,
        kept_ids=2 * entries,
        backward_wide=2 * keys,
    )


def _balanced_keys(memory: RetrievalConfig, keys: int) -> int:
    """Number of keys, out of `keys`, whose probabilities are kept."""
    return keys if memory.key_balance_weight else 0


def _selection_bytes(memory: RetrievalConfig, keys: int) -> int:
    """Per token: fp32 scores of the keys read, int64 numbers of rows and columns written."""
    return 4 * keys + 8 * memory.num_heads * 2 * (memory.row_top_k + memory.top_k)
