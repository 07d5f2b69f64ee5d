"""The bytes of the exchange and of attention across context-parallel ranks, by closed formulas.

Legend: G ranks of the memory group, T tokens of a rank, J rows read per token, n coefficients per row and rank, V value
dim, P pre-value dim, B bins.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from megamem.memory_config import MemoryConfig
from megamem.slots import Slot
from parallel.layout import coefficients_per_rank, packed_bytes
from pretrain.config.schema import RunConfig
from pretrain.costs.context import context_way, run_costs
from pretrain.costs.held import copied_elements
from pretrain.costs.stages import stages_of


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
    memory: MemoryConfig,
    num_bank_rows: int,
    *,
    group_size: int,
    num_tokens: int,
    element_bytes: int,
    follows_heads: bool = False,
) -> LookupTraffic:
    """The traffic of one lookup of T = `num_tokens` by G = `group_size` ranks, of so many bytes per element.

    Where the columns follow attention's heads (`TableLookup.read_heads` in the tensor-parallel group) a rank knows the
    rows and keeps the sums: coefficients alone are sent.
    """
    others, lookup = group_size - 1, memory.lookup
    reads = num_tokens * lookup.rows
    pre_width = memory.width("pre_values")
    return LookupTraffic(
        rows=0 if follows_heads else others * packed_bytes(reads, num_bank_rows * lookup.bins),
        pre_input=others * num_tokens * (pre_width // group_size) * element_bytes,
        products=others * reads * element_bytes if pre_width else 0,
        coefficients=others * reads * coefficients_per_rank(lookup.scores, group_size) * element_bytes,
        values=0
        if follows_heads
        else others * num_tokens * lookup.bins * (memory.width("values") // group_size) * element_bytes,
    )


def follows_heads(config: RunConfig) -> bool:
    """Whether the columns that a rank holds are those of its attention heads, see `lookup_traffic`."""
    memory, layout = config.model.memory, config.parallel
    of_heads = memory is not None and memory.slot is Slot.VALUES and config.model.latent_attention is None
    return of_heads and layout.memory == layout.tensor <= config.model.query_groups


def microbatch_bytes(config: RunConfig, lookup: LookupTraffic) -> int:
    """Of a lookup in all passes of a microbatch: forward once more where its block is recomputed, and backward.

    What is read before the blocks is not recomputed, and its coefficients are ones, which have no gradient.
    """
    if config.model.memory is not None and config.model.memory.reads_once:
        return lookup.forward + lookup.backward - lookup.coefficients
    return (2 if config.train.recompute == "full" else 1) * lookup.forward + lookup.backward


def exchanged_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for lookups in tables that are split, and for their gradients.

    Stages with more memory layers than others send more: this is their mean.
    """
    layout, train, model = config.parallel, config.train, config.model
    if model.memory is None:
        return 0
    per_microbatch = 0
    for bank_rows in (rows for stage in stages_of(config) for rows in stage.lookups):
        lookup = lookup_traffic(
            model.memory,
            bank_rows,
            group_size=layout.memory,
            num_tokens=train.micro_batch_size * train.sequence_length // (layout.tensor * layout.context),
            element_bytes=train.element_bytes,
            follows_heads=follows_heads(config),
        )
        per_microbatch += microbatch_bytes(config, lookup)
    return _num_microbatches(config, num_ranks) * per_microbatch // layout.pipeline


def copies_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step to add up the stages' gradients of the banks that each has a copy of.

    Of P stages, 2 (P - 1) / P times its share: the bank's fp32 gradient, divided by the ranks of a stage.
    """
    stages = config.parallel.pipeline
    return 2 * (stages - 1) * 4 * copied_elements(config.model) // num_ranks


def attention_bytes(config: RunConfig, num_ranks: int) -> int:
    """Bytes that a rank sends per optimizer step for attention across cut sequences, but for Transformer Engine's.

    Stages with more layers than others send more: this is their mean.
    """
    layout, train, model = config.parallel, config.train, config.model
    if layout.context == 1 or model.implementation == "transformer_engine":
        return 0
    costs = run_costs(config, context_way(config))
    forward_passes = 1 if train.recompute == "none" else 2
    per_layer = forward_passes * costs.forward + costs.backward
    return _num_microbatches(config, num_ranks) * per_layer * model.num_layers // layout.pipeline


def _num_microbatches(config: RunConfig, num_ranks: int) -> int:
    """Of one data-parallel rank and optimizer step."""
    layout, train = config.parallel, config.train
    replicas = num_ranks // (layout.tensor * layout.pipeline * layout.context)
    return train.global_batch_size // (train.micro_batch_size * replicas)
