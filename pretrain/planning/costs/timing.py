"""Seconds of an optimizer step on given hardware, in closed formulas: an estimate, part by part.

Products of matrices run at a share of the peak, streams and gathers at a share of the memory's bandwidth, messages at a
share of a link's. Work that overlaps other work counts only for the time by which it lasts longer, and `assumptions`
says what is taken to overlap. `configs/hardware` says which of these shares are assumed; `megamem study bench hardware`
measures them.

Legend: T tokens of a microbatch on a rank, G ranks of the memory group, m microbatches, P stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from megamem.config.model import ModelConfig
from megamem.parameters.trained_part import Trained
from parallel.layout import padded_size
from pretrain.config.overlap import memory_runs_beside
from pretrain.config.schema import RunConfig
from pretrain.config.updates import (
    GRADIENT_BYTES,
    MUON,
    ROW_WISE,
    matrix_update,
    orthogonalisation_flops,
    table_gradient_bytes,
    table_update,
)
from pretrain.planning.costs.block_kept import has_loss_in_chunks
from pretrain.planning.costs.branch import branch_projection
from pretrain.planning.costs.experts import dispatched_bytes
from pretrain.planning.costs.formulas import attended_flops, backward_flops, training_flops_per_token
from pretrain.planning.costs.hardware import Hardware
from pretrain.planning.costs.kept_streams import kept_streams
from pretrain.planning.costs.launches import KERNELS_PER_LAUNCH, launches_of
from pretrain.planning.costs.part_costs import table_step_bytes
from pretrain.planning.costs.pipeline_stages import Blocks, Division, Stage, stages_of
from pretrain.planning.costs.reductions import Weights, exposed, ring_s
from pretrain.planning.costs.residual_streams import SITES_PER_BLOCK, state_bytes
from pretrain.planning.costs.row_bytes import has_read_rows, replica_bytes, updated_elements
from pretrain.planning.costs.row_seconds import row_seconds
from pretrain.planning.costs.sent import pieces_of_experts, pieces_of_matrices, tensor_bytes
from pretrain.planning.costs.traffic import (
    WayBytes,
    context_bytes,
    copies_bytes,
    halo_bytes,
    lookup_bytes_of_ways,
)
from pretrain.planning.costs.weights import reduced_tables, trained_dense, trained_tables


class TimePart(StrEnum):
    """A part of a step, in the order of a report. Those of the memory begin with its name."""

    MATMULS = "backbone: products of matrices"
    ATTENTION = "backbone: attention's core"
    ELEMENTWISE = "backbone: norms, activations, sums"
    LOSS = "output projection and loss"
    MEMORY_MATMULS = "memory: queries, keys, projections"
    MEMORY_SELECTION = "memory: selection and scores"
    MEMORY_GATHERS = "memory: gathers of rows"
    MEMORY_IDS = "memory: ids and coefficients"
    MEMORY_GRADIENTS = "memory: table gradients and their sort"
    MEMORY_EXCHANGE = "memory: exchange, exposed"
    LAUNCHES = "launches: their ends, and waits for the host"
    TENSOR = "tensor-parallel collectives"
    CONTEXT = "context-parallel collectives"
    EXPERTS = "tokens to experts and back"
    MESSAGES = "messages between stages"
    BUBBLE = "pipeline bubble"
    REDUCTION = "backbone: reductions and gathers, exposed"
    MEMORY_REDUCTION = "memory: reductions and gathers of tables, exposed"
    UPDATE = "backbone: zeroing, norms, update"
    MEMORY_UPDATE = "memory: zeroing, norms, update of tables"


_REMEDIES = {
    TimePart.MEMORY_EXCHANGE: "a smaller parallel.memory inside one node, or fewer reads (top_k)",
    TimePart.MEMORY_GATHERS: "fewer or wider rows (top_k, value_dim), or a smaller parallel.memory, for wider columns",
    TimePart.MEMORY_IDS: "fewer reads (top_k)",
    TimePart.MEMORY_GRADIENTS: "fewer or wider rows (top_k, value_dim), or a smaller parallel.memory, for wider columns",
    TimePart.MEMORY_SELECTION: "fewer keys or a smaller row_top_k_limit",
    TimePart.MEMORY_MATMULS: "fewer memory layers or keys (sharing.group), or a smaller key_dim",
    TimePart.MEMORY_REDUCTION: "a larger parallel.memory, or more microbatches per step to hide it behind",
    TimePart.MEMORY_UPDATE: "a larger parallel.memory (zeroing), or more ranks",
}


_PASSES_OF_SITES = (5, 12)
"""Streams that a site reads or writes, forward and backward: for its maps, its input, and what it writes."""
_WHOLE_LOSS = 80
"""Bytes per logit that PyTorch's kernels moved for a loss both ways on an H100."""


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank of a stage sends per optimizer step, to its own node and to others.

    Attributes:
        exchange: bytes of lookups.
        tables: reductions and gathers of tables.
        dense: reductions and gathers of all other weights.
    """

    exchange: tuple[float, float]
    tables: tuple[float, float]
    dense: tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """An estimated step of a run.

    Attributes:
        by_part: seconds of the slowest stage; they add up to the step.
        tokens_per_s: tokens of all ranks per second.
        mfu: model FLOPs (without recomputation) over the peak of all GPUs.
        sent: bytes that a rank of each stage sends.
        slowest_stage: number of the stage that `by_part` is of.
    """

    by_part: dict[TimePart, float]
    tokens_per_s: float
    mfu: float
    sent: tuple[SentBytes, ...]
    slowest_stage: int

    @property
    def total_s(self) -> float:
        return sum(self.by_part.values())

    @property
    def memory_s(self) -> float:
        """Seconds of the step that the memory takes."""
        return sum(seconds for part, seconds in self.by_part.items() if part.startswith("memory: "))

    @property
    def memory_costs(self) -> list[tuple[TimePart, float, str]]:
        """The three largest parts of the memory's cost, with seconds and what would lessen them."""
        own = [(part, self.by_part[part], words) for part, words in _REMEDIES.items() if self.by_part[part] > 0]
        return sorted(own, key=lambda item: -item[1])[:3]


def step_time(config: RunConfig, num_ranks: int, hardware: Hardware) -> StepTime:
    """The estimate for a configuration that is valid on so many ranks."""
    division = Division.of(config, num_ranks)
    stages = stages_of(config)
    passes = [_microbatch(config, stage, division, hardware) for stage in stages]
    slowest = max(range(len(stages)), key=lambda index: sum(passes[index].values()))
    per_microbatch, stage = passes[slowest], stages[slowest]
    microbatch_s = sum(per_microbatch.values())
    m, layout = division.num_microbatches, config.parallel
    parts = {part: m * seconds for part, seconds in per_microbatch.items()}
    parts[TimePart.BUBBLE] = (layout.pipeline - 1) / layout.virtual_pipeline * microbatch_s
    parts |= _after_backward(config, stage, division, hardware, microbatch_s)
    step_s = sum(parts.values())
    tokens = config.train.tokens_per_step
    flops = _model_flops_per_token(config.model, config.train.sequence_length, config.optimizer.trained) * tokens
    return StepTime(
        by_part={part: parts.get(part, 0.0) for part in TimePart},
        tokens_per_s=tokens / step_s,
        mfu=flops / (step_s * num_ranks * hardware.peak_bf16_tflops * 1e12),
        sent=tuple(_sent(config, each, division, hardware) for each in stages),
        slowest_stage=slowest,
    )


@lru_cache(maxsize=16)
def _model_flops_per_token(model: ModelConfig, sequence_length: int, trained: Trained) -> float:
    return training_flops_per_token(model, sequence_length, trained)


def _microbatch(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> dict[TimePart, float]:
    """Seconds of forward and backward of one microbatch on a stage; recomputation repeats forward."""
    model, train, layout = config.model, config.train, config.parallel
    tokens, element = division.rank_tokens, train.element_bytes
    forwards = 2 if train.recompute == "full" else 1
    rows = row_seconds(config, stage, tokens, hardware)
    products, attention = _block_flops(config, stage)
    of_backward = tokens * (products[1] / hardware.flops_per_s + attention[1] / hardware.attention_flops_per_s)
    exchange = _exposed_exchange_s(config, stage, division, hardware)
    beside = beside_backward(config, rows.sort + rows.gradients, of_backward, exchange[1], hardware)
    parts = {
        TimePart.MATMULS: tokens * sum(products) / hardware.flops_per_s,
        TimePart.ATTENTION: tokens * sum(attention) / hardware.attention_flops_per_s,
        TimePart.ELEMENTWISE: _elementwise_bytes(config, stage, tokens) / hardware.stream_bytes_per_s,
        TimePart.LOSS: tokens * _loss_s(config, stage, division, hardware),
        TimePart.MEMORY_MATMULS: tokens * _memory_products_s(config, stage, hardware),
        TimePart.MEMORY_SELECTION: tokens * selection_instructions(config, stage) / (hardware.issue_g_per_s * 1e9),
        TimePart.MEMORY_GATHERS: rows.gathers,
        TimePart.MEMORY_IDS: rows.ids,
        TimePart.MEMORY_GRADIENTS: beside.gradients,
        TimePart.MEMORY_EXCHANGE: exchange[0] + beside.exchange,
    }
    parts[TimePart.TENSOR] = tensor_bytes(config, stage, division) / hardware.nvlink_bytes_per_s
    parts[TimePart.EXPERTS] = _dispatch_s(config, stage, division, hardware)
    parts[TimePart.CONTEXT] = _context_s(config, stage, hardware)
    boundary = tokens * state_bytes(model, element)
    crossings = len(stage.chunks) + stage.gradients_sent if layout.pipeline > 1 else 0
    parts[TimePart.MESSAGES] = crossings * boundary / hardware.network_bytes_per_s
    launches = launches_of(config, stage, stage.blocks, 0) + launches_of(config, stage, stage.backward, 1)
    launches += (forwards - 1) * launches_of(config, stage, stage.backward, 0)
    kernels, device_s = KERNELS_PER_LAUNCH * launches, sum(parts.values())
    parts[TimePart.LAUNCHES] = kernels * hardware.kernel_us * 1e-6
    if train.cuda_graph == "none":
        parts[TimePart.LAUNCHES] = max(parts[TimePart.LAUNCHES], kernels * hardware.launch_us * 1e-6 - device_s)
    return parts


def _elementwise_bytes(config: RunConfig, stage: Stage, tokens: int) -> float:
    """Bytes of all that a stage's blocks do between products, as their kernels count them on a GPU.

    Forward reads and writes the columns of each norm, of queries and keys, which are turned, of a SwiGLU and of the sums
    after both branches; backward has a gradient more of each, joins those of queries, keys and values, and adds the
    weights' to sums in fp32, element by element, which takes as long as 14 bytes.
    """
    model, element = config.model, config.train.element_bytes
    forwards = 2 if config.train.recompute == "full" else 1

    def columns(blocks: Blocks, gradients: int) -> float:
        """Columns that are read or written in a pass, of hidden states, of heads, and of feed-forwards."""
        heads = (2 + gradients) * (model.num_attention_heads + model.query_groups)
        heads += gradients * 2 * (model.num_attention_heads + 2 * model.query_groups)
        of_ffn = (3 + 2 * gradients) * model.active_ffn_width
        if model.moe is not None:
            # In the order of the experts, and back.
            of_ffn += 4 * model.moe.top_k * model.hidden_size
        of_norms = (2 + gradients) * blocks.norms * model.hidden_size
        sums = 3 * (blocks.num + blocks.ffns) * model.hidden_size
        if model.num_streams is not None:
            of_site = _PASSES_OF_SITES[gradients] * model.num_streams * model.hidden_size
            sums = SITES_PER_BLOCK * blocks.num * of_site
        return of_norms + sums + blocks.num * heads * model.attention_head_dim + blocks.ffns * of_ffn

    passed = columns(stage.blocks, 0) + (forwards - 1) * columns(stage.backward, 0) + columns(stage.backward, 1)
    if model.num_streams is not None:
        # Streams before, those after, and an output.
        passed += kept_streams(config, stage).mixed_again * (2 * model.num_streams + 1) * model.hidden_size
    return tokens * element * passed + 14 * trained_dense(config, stage)


def _loss_s(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> float:
    """Seconds per token of the output projection and the loss. In chunks backward has logits again; they are read once
    forward, and once more in backward, where gradients replace them."""
    vocabulary = stage.has_loss * padded_size(config.model.vocab_size or 0, config.model.vocab_size_multiple)
    in_chunks = has_loss_in_chunks(config, division.loss_tokens)
    num_products = 2 + stage.trains_all + in_chunks
    products = num_products * 2.0 * vocabulary * config.model.hidden_size / hardware.flops_per_s
    read = (6 if in_chunks else _WHOLE_LOSS) * vocabulary / hardware.stream_bytes_per_s
    return (1 + stage.branch_blocks) * (products + read)


def _memory_products_s(config: RunConfig, stage: Stage, hardware: Hardware) -> float:
    """Seconds per token of the products of a stage's memories, and of their norms, sums and copies. Memories in a backward
    pass are taken to be trained.

    Thin products take what their operands do, at two thirds of a stream's bandwidth; the rest moved 25 times a hidden state
    on an H100, 10 of them forward.
    """
    own, element, width = stage.memory, config.train.element_bytes, config.model.hidden_size
    forward, backward = _memory_passes(config, stage)
    flops = own.key_flops + own.projection_flops
    operands = element * (own.scored + sum(rows + columns for rows, columns in own.matrices))
    products = max(flops / hardware.flops_per_s, 1.5 * operands / hardware.stream_bytes_per_s)
    others = element * width * stage.blocks.memories * (10 * forward + 15 * backward)
    return (forward + 2 * backward) * products + others / hardware.stream_bytes_per_s


def _memory_passes(config: RunConfig, stage: Stage) -> tuple[float, float]:
    """Forward and backward passes of a stage's memories, on the average over them."""
    backward = stage.backward.memories / max(1, stage.blocks.memories)
    return 1 + (config.train.recompute == "full") * backward, backward


def selection_instructions(config: RunConfig, stage: Stage) -> float:
    """Instructions of warps per token for the selections of a stage's memories and the scores of what they select, as an
    H100 took them for 32 and for 128 retrieved values."""
    own, (forward, backward) = stage.memory, _memory_passes(config, stage)
    return forward * (2.5 * own.scored + 8 * own.candidates) + backward * (own.scored + 4.5 * own.compared)


def _block_flops(config: RunConfig, stage: Stage) -> tuple[tuple[float, float], tuple[float, float]]:
    """FLOPs per token of a stage's blocks without memories, forward and backward: of products with weights, and of
    attention's core. Backward has what is computed again."""
    model, recompute = config.model, config.train.recompute
    attention = attended_flops(model, config.train.sequence_length)

    branch = stage.branch_blocks * branch_projection(model)

    def products(blocks: Blocks) -> float:
        weights: float = blocks.split_weights + blocks.weights_used_twice + (branch if blocks.num else 0)
        if model.moe is not None:
            weights += blocks.expert_weights * model.moe.top_k / model.moe.num_experts
        return 2.0 * weights

    backward = backward_flops(products(stage.backward), products(stage.trained_blocks), 0.0)
    again = products(stage.backward) if recompute == "full" else 0.0
    cores = 2 + (recompute != "none")
    return (
        (products(stage.blocks), backward + again),
        (stage.blocks.num * attention, cores * stage.backward.num * attention),
    )


def _exposed_exchange_s(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a microbatch's exchanges, forward and backward, beyond those of the feed-forwards' products that they
    run beside.

    A memory waits for its exchanges: its other kernels and the products share the GPU.
    """
    memories = stage.blocks.memories
    if config.parallel.memory == 1 or not memories:
        return 0.0, 0.0
    forward, backward = exchange_s_of_ways(config, stage, division, hardware)
    beside = stage.blocks.beside / memories if config.parallel.overlap_memory else 0.0
    model, tokens = config.model, division.rank_tokens
    ffn_s = 2 * 3 * model.hidden_size * model.active_ffn_width * tokens / hardware.flops_per_s
    forwards, backwards = _memory_passes(config, stage)
    of_forward = forwards * beside * memories * ffn_s
    of_backward = 2 * backwards * beside * memories * ffn_s
    # As much of the exchanges as belongs to memories that have a product beside them.
    return forward - min(beside * forward, of_forward), backward - min(beside * backward, of_backward)


@dataclass(frozen=True)
class BesideBackward:
    """Seconds by which gradients of tables, and exchanges, make a backward pass longer.

    Attributes:
        gradients: seconds of the gradients, more than they take alone if their share of the GPU is too small for them.
        exchange: seconds of backward's exchanges that no gradients hide.
    """

    gradients: float
    exchange: float


def beside_backward(
    config: RunConfig, gradients_s: float, products_s: float, exchange_s: float, hardware: Hardware
) -> BesideBackward:
    """Gradients of tables beside the rest of a backward pass.

    The memory's next kernels, which have priority, wait for exchanges meanwhile. Products run beside them if they leave
    some of the multiprocessors: as many as a kernel of rows needs to reach its bandwidth do not slow it down, and
    products slow down by as many as it has.

    Args:
        gradients_s: seconds of the gradients with the whole GPU, sort included.
        products_s: seconds of backward's products of matrices.
        exchange_s: seconds of backward's exchanges that no product hides.
    """
    if not memory_runs_beside(config):
        return BesideBackward(gradients_s, exchange_s)
    share = config.parallel.gradient_sm_share
    slowed = gradients_s * max(1.0, hardware.row_sm_share / share)
    both = max(slowed, products_s + share * slowed)
    return BesideBackward(both - products_s, exchange_s - min(exchange_s, gradients_s))


def exchange_s_of_ways(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a microbatch's exchanges, forward and backward."""
    forward, backward = (way_s(way, config, hardware) for way in lookup_bytes_of_ways(config, stage, division))
    return forward, backward


def way_s(way: WayBytes, config: RunConfig, hardware: Hardware) -> float:
    """Seconds of exchanges one after the other, some of which are gathers."""
    group = config.parallel.memory
    # What a ring of G sends, (G - 1) / G of it.
    gathers = ring_s(way.gathered * group / (group - 1), group, 1, hardware)
    meeting = _link_s(way.meeting, config.parallel.memory_columns, hardware)
    return gathers + meeting + _link_s(way.direct, group, hardware)


def _link_s(num_bytes: float, group: int, hardware: Hardware) -> float:
    near, far = _near_and_far(num_bytes, group, hardware)
    return max(near / hardware.nvlink_bytes_per_s, far / hardware.network_bytes_per_s)


def assumptions(config: RunConfig, stage: Stage, hardware: Hardware) -> tuple[str, ...]:
    """Sentences that say what the estimate of a stage takes to run beside other work, and how its rows are read."""
    layout, memories = config.parallel, stage.blocks.memories
    said = []
    if memories and layout.memory > 1:
        beside = stage.blocks.beside if layout.overlap_memory else 0
        said.append(f"exchanges of {beside} of {memories} memories run beside the products of their feed-forwards")
    if memories and memory_runs_beside(config):
        share = layout.gradient_sm_share
        said.append(
            "backward's exchanges also run beside gradients of tables"
            if share == 1
            else f"backward's exchanges and products run beside gradients of tables, which have {100 * share:g} % of the "
            f"multiprocessors and reach their bandwidth with {100 * hardware.row_sm_share:g} %"
        )
    if memories:
        said.append("all other kernels of a memory run alone")
    for on, key, work, where in (
        (
            layout.overlap_grad_reduce,
            "overlap_grad_reduce",
            "reductions",
            "the last backward pass, each when it is due",
        ),
        (
            layout.overlap_param_gather,
            "overlap_param_gather",
            "gathers",
            "the next forward pass, each until it is needed",
        ),
    ):
        said.append(f"{work} run beside {where}" if on else f"{work} run alone (parallel.{key} is false)")
    if memories:
        skew = f"by Zipf's law with {hardware.row_skew:g}" if hardware.row_skew else "evenly"
        said.append(f"rows of tables are read {skew}")
    return (*said, "collectives of tensor and context parallelism, and messages between stages, run alone")


def _exchanged(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> tuple[float, float]:
    """Bytes that a rank of a stage sends per step for its lookups, to its own node and to others."""
    group = config.parallel.memory
    ways = lookup_bytes_of_ways(config, stage, division)
    parts = [
        _near_and_far(sum(way.direct for way in ways), group, hardware),
        _near_and_far(sum(way.meeting for way in ways), config.parallel.memory_columns, hardware),
    ]
    gathered = sum(way.gathered for way in ways)
    # A ring crosses between nodes once per node, whose ranks share their adapters.
    crossing = gathered / hardware.gpus_per_node if group > hardware.gpus_per_node else 0.0
    near, far = (sum(both) for both in zip((gathered - crossing, crossing), *parts, strict=True))
    return division.num_microbatches * near, division.num_microbatches * far


def _near_and_far(num_bytes: float, group: int, hardware: Hardware) -> tuple[float, float]:
    """Split of bytes that a group of consecutive ranks sends to its members alike: in the node, and to others."""
    if group == 1:
        return 0.0, 0.0
    near = num_bytes * (min(group, hardware.gpus_per_node) - 1) / (group - 1)
    return near, num_bytes - near


def _dispatch_s(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> float:
    """Seconds that a microbatch's tokens take to experts and back, which nothing hides."""
    return _link_s(dispatched_bytes(config, stage, division), config.parallel.memory, hardware)


def _context_s(config: RunConfig, stage: Stage, hardware: Hardware) -> float:
    layout, halo = config.parallel, halo_bytes(config, stage, busiest=True)
    in_node = layout.tensor * layout.context <= hardware.gpus_per_node
    return (context_bytes(config, stage) + halo.ids + halo.hidden) / (
        hardware.nvlink_bytes_per_s if in_node else hardware.network_bytes_per_s
    )


def _after_backward(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware, microbatch_s: float
) -> dict[TimePart, float]:
    """Reductions and gathers that the last backward and the next forward pass do not hide, and the update."""
    layout, element = config.parallel, config.train.element_bytes
    # Backward is two of the three to four passes of a microbatch, forward one.
    passes = 4 if config.train.recompute == "full" else 3
    waits = exposed(config, stage, division, hardware, microbatch_s / passes, microbatch_s * (passes - 1) / passes)
    kinds = ((TimePart.MEMORY_REDUCTION, Weights.TABLES), (TimePart.REDUCTION, Weights.DENSE))
    parts = {part: waits.reduce_s[kind] + waits.gather_s[kind] for part, kind in kinds}
    # After all else stages add up the gradients of banks that each has a copy of, and replicas the rows that they have read.
    for sent, size, stride in (
        (copies_bytes(config, stage, division), layout.pipeline, division.stage_ranks),
        (replica_bytes(config, stage, division), division.table_replicas, layout.memory),
    ):
        # What a ring of this size sends is (size - 1) / size of it.
        seconds = ring_s(sent * size / max(1, size - 1), size, stride, hardware)
        parts[TimePart.MEMORY_REDUCTION] += seconds / config.optimizer.tables_every
    for part, weights, replicas in (
        (TimePart.MEMORY_UPDATE, trained_tables(config, stage), division.table_replicas),
        (TimePart.UPDATE, trained_dense(config, stage), division.replicas * layout.context),
    ):
        owned, tables = weights / replicas, stage.trained.table_elements / layout.memory / replicas
        if part == TimePart.MEMORY_UPDATE and has_read_rows(config):
            # Of the rows that were read alone, on each replica.
            tables = updated_elements(config, stage, division)
            weights = reduced_tables(config, stage) + tables
            owned = reduced_tables(config, stage) / replicas + tables
        on_host = part == TimePart.MEMORY_UPDATE and config.optimizer.value_offload == "cpu"
        # AdamW moves 28 bytes, and the weight is rounded from one of 4.
        updated = (28 + 4 + element) * owned
        if part == TimePart.MEMORY_UPDATE and table_update(config.optimizer) is ROW_WISE:
            updated += (table_step_bytes(config) - 32 - element) * tables
        gradient = table_gradient_bytes(config.optimizer) if part == TimePart.MEMORY_UPDATE else GRADIENT_BYTES
        # Zeroing writes the gradient, and the number of targets divides it in place; then it is read for its norm, and
        # clipped in place.
        moved = 3 * gradient * (weights + owned) + (0 if on_host else updated)
        updates = config.optimizer.tables_every if part == TimePart.MEMORY_UPDATE else 1
        parts[part] = moved / hardware.stream_bytes_per_s / updates
        parts[part] += _orthogonalisation_s(
            config, stage, division, hardware, of_experts=part == TimePart.MEMORY_UPDATE
        )
        if on_host:
            # docs/memory-parallel.md: the copies either way, or the host's own traffic, whichever takes longer.
            copied = (4 + element) * owned / (hardware.host_link_gb_per_s * 1e9)
            parts[part] += max(copied, 40 * owned / (hardware.host_memory_gb_per_s * 1e9))
    return parts


def _orthogonalisation_s(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware, *, of_experts: bool
) -> float:
    """Seconds of the products by which Muon updates hidden matrices, and of the exchange of their pieces; 0 without it.

    The ranks that own a matrix share the matrices between them, and one is never divided: no rank is done before the
    largest is.
    """
    if matrix_update(config.optimizer) is not MUON:
        return 0.0
    matrices, layout = stage.trained.matrices, config.parallel
    if of_experts:
        # Ranks of a memory group have different ones.
        shapes, num_workers = matrices.experts, division.table_replicas * layout.memory
        sent = pieces_of_experts(config, stage, division)
    else:
        shapes, num_workers = matrices.split + matrices.whole, division.replicas * layout.context * layout.tensor
        sent = pieces_of_matrices(config, stage, division)
    flops = orthogonalisation_flops(shapes, config.optimizer)
    products = max([sum(flops) / num_workers, *flops]) / hardware.flops_per_s
    in_node = num_workers <= hardware.gpus_per_node
    return products + sent / (hardware.nvlink_bytes_per_s if in_node else hardware.network_bytes_per_s)


def _sent(config: RunConfig, stage: Stage, division: Division, hardware: Hardware) -> SentBytes:
    layout, width = config.parallel, 4 + config.train.element_bytes

    def ring(weights: float, size: int, stride: int, more: float = 0.0) -> tuple[float, float]:
        sent = weights * width * (size - 1) / size + more
        in_node = max(1, min(size, hardware.gpus_per_node // stride))
        far = sent / in_node if size > in_node else 0.0
        return sent - far, far

    return SentBytes(
        exchange=_exchanged(config, stage, division, hardware),
        tables=ring(
            reduced_tables(config, stage),
            division.table_replicas,
            layout.memory,
            replica_bytes(config, stage, division),
        ),
        dense=ring(trained_dense(config, stage), division.replicas * layout.context, layout.tensor),
    )
