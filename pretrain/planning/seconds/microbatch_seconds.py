"""Seconds of forward and backward of one microbatch on a stage, part by part."""

from __future__ import annotations

from parallel.layout import padded_size
from pretrain.config.schema import RunConfig
from pretrain.planning.bytes.block_kept import has_loss_in_chunks
from pretrain.planning.bytes.kept_streams import kept_streams
from pretrain.planning.bytes.launches import KERNELS_PER_LAUNCH, launches_of
from pretrain.planning.bytes.weights import trained_dense
from pretrain.planning.counts.branch import branch_projection
from pretrain.planning.counts.formulas import attended_flops, backward_flops
from pretrain.planning.counts.pipeline_stages import Blocks, Division, Stage
from pretrain.planning.counts.residual_streams import SITES_PER_BLOCK, state_bytes
from pretrain.planning.seconds.exchange_seconds import beside_backward, dispatch_s, exposed_exchange_s, memory_passes
from pretrain.planning.seconds.hardware import Hardware
from pretrain.planning.seconds.row_seconds import row_seconds
from pretrain.planning.seconds.tensor_traffic import tensor_bytes
from pretrain.planning.seconds.time_parts import TimePart
from pretrain.planning.seconds.traffic import context_bytes, halo_bytes

_PASSES_OF_SITES = (5, 12)
"""Streams that a site reads or writes, forward and backward: for its maps, its input, and what it writes."""
_WHOLE_LOSS = 80
"""Bytes per logit that PyTorch's kernels moved for a loss both ways on an H100."""


def microbatch_seconds(
    config: RunConfig, stage: Stage, division: Division, hardware: Hardware
) -> dict[TimePart, float]:
    """Seconds of forward and backward of one microbatch on a stage; recomputation repeats forward."""
    model, train, layout = config.model, config.train, config.parallel
    tokens, element = division.rank_tokens, train.element_bytes
    forwards = 2 if train.recompute == "full" else 1
    rows = row_seconds(config, stage, tokens, hardware)
    products, attention = _block_flops(config, stage)
    of_backward = tokens * (products[1] / hardware.flops_per_s + attention[1] / hardware.attention_flops_per_s)
    exchange = exposed_exchange_s(config, stage, division, hardware)
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
    parts[TimePart.EXPERTS] = dispatch_s(config, stage, division, hardware)
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
    forward, backward = memory_passes(config, stage)
    flops = own.key_flops + own.projection_flops
    operands = element * (own.scored + sum(rows + columns for rows, columns in own.matrices))
    products = max(flops / hardware.flops_per_s, 1.5 * operands / hardware.stream_bytes_per_s)
    others = element * width * stage.blocks.memories * (10 * forward + 15 * backward)
    return (forward + 2 * backward) * products + others / hardware.stream_bytes_per_s


def selection_instructions(config: RunConfig, stage: Stage) -> float:
    """Instructions of warps per token for the selections of a stage's memories and the scores of what they select, as an
    H100 took them for 32 and for 128 retrieved values."""
    own, (forward, backward) = stage.memory, memory_passes(config, stage)
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


def _context_s(config: RunConfig, stage: Stage, hardware: Hardware) -> float:
    layout, halo = config.parallel, halo_bytes(config, stage, busiest=True)
    in_node = layout.tensor * layout.context <= hardware.gpus_per_node
    return (context_bytes(config, stage) + halo.ids + halo.hidden) / (
        hardware.nvlink_bytes_per_s if in_node else hardware.network_bytes_per_s
    )
