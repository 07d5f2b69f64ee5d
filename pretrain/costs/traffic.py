"""The bytes of the exchange and of attention across context-parallel ranks, by closed formulas.

Legend: G ranks of the memory group, CP of the context-parallel group, T tokens of a rank, J rows read per token,
n coefficients per row and rank, V value dim, P pre-value dim, B bins, g key/value heads and d head dimension.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from megamem.config import ModelConfig
from megamem.memory_config import MemoryConfig
from parallel.exchange import coefficients_per_rank
from parallel.packed_rows import RowFormat
from pretrain.config.schema import RunConfig


@dataclass(frozen=True)
class LookupTraffic:
    """What one rank sends to the others of its group in one forward pass of one lookup, in bytes; it receives as much.

    Attributes:
        rows: (G - 1) T J x bytes per id.
        pre_input: (G - 1) / G T P x bytes per element.
        products: (G - 1) T J x bytes per element.
        coefficients: (G - 1) T J n x bytes per element.
        values: (G - 1) / G T B V x bytes per element.
    """

    rows: int
    pre_input: int
    products: int
    coefficients: int
    values: int

    @property
    def forward(self) -> int:
        """All five."""
        return sum(astuple(self))

    @property
    def backward(self) -> int:
        """The mirror image; the rows are there already."""
        return self.forward - self.rows


def lookup_traffic(
    memory: MemoryConfig, num_bank_rows: int, *, group_size: int, num_tokens: int, element_bytes: int
) -> LookupTraffic:
    """The traffic of one lookup of T = `num_tokens` by G = `group_size` ranks, of so many bytes per element."""
    others, lookup = group_size - 1, memory.lookup
    reads = num_tokens * lookup.rows
    pre_width = memory.width("pre_values")
    return LookupTraffic(
        rows=others * RowFormat(num_bank_rows, lookup.bins).num_bytes(reads),
        pre_input=others * num_tokens * (pre_width // group_size) * element_bytes,
        products=others * reads * element_bytes if pre_width else 0,
        coefficients=others * reads * coefficients_per_rank(lookup.scores, group_size) * element_bytes,
        values=others * num_tokens * lookup.bins * (memory.width("values") // group_size) * element_bytes,
    )


def attention_traffic(
    model: ModelConfig, *, context_size: int, tensor_size: int, num_tokens: int, element_bytes: int
) -> int:
    """Bytes that one rank sends to the others of its context-parallel group for the attention of one layer.

    (CP - 1) T 2 g d / tensor_size x bytes per element, in every forward pass and in the backward pass: the keys and
    values of its tokens to all others, and the gradients of theirs back. It receives as much.

    Args:
        model: whose key/value heads are split over tensor-parallel ranks.
        context_size: CP.
        tensor_size: over how many.
        num_tokens: T, before sequence parallelism splits them over tensor-parallel ranks.
        element_bytes: of activations.
    """
    heads = model.query_groups // tensor_size
    return (context_size - 1) * num_tokens * 2 * heads * model.attention_head_dim * element_bytes


def exchanged_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for lookups in tables that are split, and for their gradients.

    Stages with more memory layers than others send more: this is their mean.
    """
    layout, train, model = config.parallel, config.train, config.model
    if model.memory is None:
        return 0
    forward_passes = 2 if train.recompute == "full" else 1
    plan, per_microbatch = model.memory_plan, 0
    for view in plan.views:
        lookup = lookup_traffic(
            model.memory,
            plan.banks[view.bank].num_rows,
            group_size=layout.memory,
            num_tokens=train.micro_batch_size * train.sequence_length // (layout.tensor * layout.context),
            element_bytes=train.element_bytes,
        )
        per_microbatch += forward_passes * lookup.forward + lookup.backward
    return _num_microbatches(config, num_ranks) * per_microbatch // layout.pipeline


def attention_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for attention across cut sequences, but for Transformer Engine's.

    Stages with more layers than others send more: this is their mean.
    """
    layout, train, model = config.parallel, config.train, config.model
    if model.implementation == "transformer_engine":
        return 0
    per_pass = attention_traffic(
        model,
        context_size=layout.context,
        tensor_size=layout.tensor,
        num_tokens=train.micro_batch_size * train.sequence_length // layout.context,
        element_bytes=train.element_bytes,
    )
    passes = 2 if train.recompute == "none" else 3
    return _num_microbatches(config, num_ranks) * passes * per_pass * model.num_layers // layout.pipeline


def _num_microbatches(config: RunConfig, num_ranks: int) -> int:
    """Of one data-parallel rank and optimizer step."""
    layout, train = config.parallel, config.train
    replicas = num_ranks // (layout.tensor * layout.pipeline * layout.context)
    return train.global_batch_size // (train.micro_batch_size * replicas)
