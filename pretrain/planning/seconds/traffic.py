"""The bytes of the exchange and of attention across context-parallel ranks, by closed formulas.

Legend: G ranks of the memory group, R parts of rows, T tokens of a rank, J rows read per token, C scores per row, n
coefficients per row and rank, V value dim, P pre-value dim, B bins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from kernels.common.ids import bytes_per_id
from megamem.config.memory import MemoryConfig
from parallel.layout import coefficients_per_rank, columns_meet_first, halo_tokens_returned, halo_tokens_sent
from pretrain.config.context_ways import context_way, run_costs
from pretrain.config.schema import RunConfig
from pretrain.config.updates import GRADIENT_BYTES
from pretrain.planning.bytes.row_bytes import copied_elements_read, has_read_rows
from pretrain.planning.counts.pipeline_stages import Division, FamilyInStage, Stage


@dataclass(frozen=True)
class LookupTraffic:
    """Bytes that one rank sends to the others of its group in one lookup; it receives as many.

    Where columns meet first (`columns_meet_first`) they have a message of their own, and what follows is G / R times less.

    Attributes:
        rows: (G - 1) T J x bytes per id.
        pre_input: (G - 1) R / G T P x bytes per element.
        meeting_products: (G / R - 1) R T J x bytes per element; else 0.
        products: (G - 1) T J x bytes per element, or R / G of it.
        coefficients: (G - 1) T J n x bytes per element; with parts of rows C in place of n.
        products_back: (G - 1) T J x bytes per element, in a backward pass.
        meeting_coefficients: (G / R - 1) R T J n x bytes per element, in a backward pass; else 0.
        coefficient_gradients: (G - 1) T J n x bytes per element, or R / G of it with C in place of n, in a backward pass;
            0 where scores have none.
        values: (G - 1) R / G T B V x bytes per element.
        gathers_coefficients: True if the coefficients go to all ranks alike.
    """

    rows: int
    pre_input: int
    meeting_products: int
    products: int
    coefficients: int
    products_back: int
    meeting_coefficients: int
    coefficient_gradients: int
    values: int
    gathers_coefficients: bool

    @property
    def forward_way(self) -> WayBytes:
        """Bytes of a forward pass."""
        coefficients = self.coefficients * self.gathers_coefficients
        direct = self.pre_input + self.products + self.coefficients - coefficients + self.values
        return WayBytes(self.rows + coefficients, direct, self.meeting_products)

    @property
    def backward_way(self) -> WayBytes:
        """Bytes of a backward pass: the mirror image; the rows are there already."""
        direct = self.pre_input + self.coefficient_gradients + self.values
        return WayBytes(self.products_back, direct, self.meeting_coefficients)

    @property
    def forward(self) -> int:
        """Bytes of a forward pass."""
        return self.forward_way.total

    @property
    def backward(self) -> int:
        """Bytes of a backward pass."""
        return self.backward_way.total


@dataclass(frozen=True)
class WayBytes:
    """Bytes that a rank sends for lookups, forward or backward.

    Attributes:
        gathered: bytes of gathers, whose blocks a ring passes on: each crosses between two nodes once.
        direct: bytes of messages that give each rank its own.
        meeting: bytes of messages that give each rank with other columns of the same rows its own.
    """

    gathered: int = 0
    direct: int = 0
    meeting: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gathered + self.direct + self.meeting

    def __add__(self, other: WayBytes) -> WayBytes:
        return WayBytes(self.gathered + other.gathered, self.direct + other.direct, self.meeting + other.meeting)

    def __rmul__(self, number: int) -> WayBytes:
        return WayBytes(number * self.gathered, number * self.direct, number * self.meeting)


def lookup_traffic(
    memory: MemoryConfig,
    num_bank_rows: int,
    *,
    group_size: int,
    row_parts: int = 1,
    num_tokens: int,
    element_bytes: int,
    follows_heads: bool = False,
) -> LookupTraffic:
    """The traffic of one lookup of T = `num_tokens` by G = `group_size` ranks with R = `row_parts`, of so many bytes per
    element.

    Where the columns follow attention's heads (`TableLookup.read_heads` in the tensor-parallel group) a rank knows the
    rows and keeps the sums: coefficients alone are sent.
    """
    others, lookup, column_parts = group_size - 1, memory.lookup, group_size // row_parts
    reads = num_tokens * lookup.rows
    pre_width = memory.width("pre_values")
    num_own = coefficients_per_rank(lookup.scores, column_parts)
    coefficients = others * reads * num_own * element_bytes
    scores = others * reads * lookup.scores * element_bytes
    products = others * reads * element_bytes if pre_width else 0
    back = coefficients if lookup.learns_scores else 0
    meet = columns_meet_first(row_parts, column_parts, num_tokens)
    # Shares of the tokens of all ranks, for each of the others that meet.
    meeting = row_parts * (column_parts - 1) if meet else 0
    return LookupTraffic(
        rows=0 if follows_heads else others * reads * bytes_per_id(num_bank_rows * lookup.bins),
        pre_input=others * num_tokens * (pre_width // column_parts) * element_bytes,
        meeting_products=reads * meeting * element_bytes if pre_width else 0,
        products=products // column_parts if meet else products,
        coefficients=coefficients if row_parts == 1 else scores,
        products_back=products,
        meeting_coefficients=reads * meeting * num_own * element_bytes if lookup.learns_scores else 0,
        coefficient_gradients=scores // column_parts * lookup.learns_scores if meet else back,
        values=0
        if follows_heads
        else others * num_tokens * lookup.bins * (memory.width("values") // column_parts) * element_bytes,
        gathers_coefficients=row_parts > 1,
    )


def follows_heads(config: RunConfig, memory: MemoryConfig) -> bool:
    """Tell whether the columns of a memory that a rank holds are those of its attention heads, see `lookup_traffic`."""
    layout = config.parallel
    of_heads = memory.follows_heads and config.model.latent_attention is None
    return of_heads and layout.memory == layout.tensor <= config.model.query_groups


def lookup_bytes_of_ways(config: RunConfig, stage: Stage, division: Division) -> tuple[WayBytes, WayBytes]:
    """Bytes that a rank of a stage sends for all lookups of a microbatch: of all forward passes, those of blocks that are
    recomputed too, and of backward.

    A read before the blocks is not recomputed.
    """
    forward = backward = WayBytes()
    traffic_of = partial(
        lookup_traffic,
        group_size=config.parallel.memory,
        row_parts=config.parallel.memory_rows,
        num_tokens=division.rank_tokens,
        element_bytes=config.train.element_bytes,
    )

    def ways_of(memory: MemoryConfig, rows: int) -> tuple[WayBytes, WayBytes]:
        lookup = traffic_of(memory, rows, follows_heads=follows_heads(config, memory))
        return lookup.forward_way, lookup.backward_way

    for family in stage.families:
        for rows, number in Counter(family.lookups).items():
            forward += number * ways_of(family.memory, rows)[0]
        for rows, number in Counter(family.backward_lookups).items():
            again, back = ways_of(family.memory, rows)
            backward += number * back
            if config.train.recompute == "full" and not family.memory.reads_once:
                forward += number * again
    return forward, backward


def copies_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes that a rank sends per optimizer step to add up the stages' gradients of the banks that each has a copy of.

    With P stages it sends 2 (P - 1) / P times its share: the bank's fp32 gradient, divided by the ranks of a stage, or the
    rows that its replica has read.
    """
    if has_read_rows(config):
        elements = copied_elements_read(config, stage, division)
    else:
        elements = sum(bank.elements for bank in stage.trained_banks if bank.on_every_stage) / division.stage_ranks
    stages = config.parallel.pipeline
    return 2 * (stages - 1) / stages * GRADIENT_BYTES * elements


def context_bytes(config: RunConfig, stage: Stage) -> int:
    """Bytes that a rank of a stage sends for attention across cut sequences in a microbatch; Transformer Engine's are
    not counted."""
    if config.parallel.context == 1 or config.model.implementation == "transformer_engine":
        return 0
    costs = run_costs(config, context_way(config))
    again = config.train.recompute != "none"
    return stage.blocks.num * costs.forward + stage.backward.num * (again * costs.forward + costs.backward)


@dataclass(frozen=True)
class HaloTraffic:
    """Bytes that a rank of a stage sends in a microbatch for what looks back across cuts of a sequence.

    Attributes:
        ids: bytes of token ids, over context-parallel ranks, once for all layers of a chunk.
        hidden: bytes of hidden states, over tensor- and context-parallel ranks, forward, again where blocks are
            recomputed, and backward.
    """

    ids: int
    hidden: int


def halo_bytes(config: RunConfig, stage: Stage, *, busiest: bool = False) -> HaloTraffic:
    """See `HaloTraffic`: of the first rank, or of the one that sends the most, for which the others wait.

    Ranks in the middle of sequences send for each of their stretches, of which context parallelism gives them two, and
    the first rank's second stretch is the end of the sequence.
    """
    looking = [each for each in stage.families if each.memory.ids_before or each.costs.halo_tokens]
    of_families = [_halo_bytes(config, stage, family, busiest=busiest) for family in looking]
    return HaloTraffic(sum(each.ids for each in of_families), sum(each.hidden for each in of_families))


def _halo_bytes(config: RunConfig, stage: Stage, family: FamilyInStage, *, busiest: bool) -> HaloTraffic:
    layout, train, memory = config.parallel, config.train, family.memory
    reading = {layer.span.read for layer in config.model.memory_layers if layer.memory.kind == memory.kind}
    chunks = sum(bool(reading & set(chunk.layers)) for chunk in stage.chunks)
    of_context = train.sequence_length // layout.context
    width = family.costs.halo_tokens // len(family.lookups)
    # Where a halo is no longer than a stretch, none has more to send than the first two of context parallelism, whose
    # tensor-parallel ranks follow one another.
    is_short = max(width, memory.ids_before) <= of_context // layout.tensor // 2
    some = (min(2, layout.context) if is_short else layout.context) if busiest else 1
    ids = max(
        halo_tokens_sent(rank, of_context, memory.ids_before, tensor=1, context=layout.context) for rank in range(some)
    )
    num_backward = len(family.backward_lookups)
    forward = len(family.lookups) + (num_backward if train.recompute == "full" else 0)

    def elements(rank: int) -> int:
        cut = {"tensor": layout.tensor, "context": layout.context}
        sent = halo_tokens_sent(rank, of_context // layout.tensor, width, **cut)
        # Backward returns the gradients of what came, from whom it came: the first rank asks for what it has the end of.
        returned = halo_tokens_returned(rank, of_context // layout.tensor, width, **cut)
        return forward * sent + num_backward * returned

    most = max(elements(rank) for rank in range(some * layout.tensor if busiest else 1))
    return HaloTraffic(
        ids=chunks * ids * train.micro_batch_size * 8,
        hidden=most
        * train.micro_batch_size
        * (config.model.num_streams or 1)
        * config.model.hidden_size
        * train.element_bytes,
    )
