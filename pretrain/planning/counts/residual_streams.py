"""Weights, FLOPs and bytes of several residual streams, by closed formulas; nothing where there is one.

A block has two sites, attention's and the feed-forward's. Bytes are those of the kernels that a GPU has.

Legend: n streams, D hidden size, r low rank, M maps of a site.
"""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.placement.block_plan import BlockPlan
from megamem.residual_streams.config import ResidualStreamsConfig, Shapes

SITES_PER_BLOCK = 2
_WIDE = 4
"""Bytes of an element in fp32, in which maps are found."""


def num_norms(model: ModelConfig, block: BlockPlan) -> int:
    """Norms of hidden states in a block: none where sites read what is normalised."""
    return 0 if (streams := model.residual_streams) is not None and streams.normalises else block.num_norms


def last_norm(model: ModelConfig) -> int:
    """Gains of the norm behind the last block."""
    return 0 if (streams := model.residual_streams) is not None and streams.normalises else model.hidden_size


def site_weights(model: ModelConfig) -> int:
    """Weights of a block's sites, which every rank has."""
    streams = model.residual_streams
    return 0 if streams is None else SITES_PER_BLOCK * streams.num_site_parameters(model.hidden_size)


def end_weights(model: ModelConfig) -> int:
    """Weights behind the last block that make one stream of all; every rank has them."""
    streams = model.residual_streams
    return 0 if streams is None else streams.num_end_parameters(model.hidden_size)


def site_matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the hidden matrices of a block's sites."""
    return SITES_PER_BLOCK * end_matrices(model)


def end_matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the hidden matrices of one read: those of a gate."""
    streams = model.residual_streams
    if streams is None or streams.kind != "gated":
        return ()
    width = streams.count * model.hidden_size
    return (streams.rank, width), (width, streams.rank)


def site_flops(model: ModelConfig) -> float:
    """Operations per token of the maps of a block's sites. Weighing and mixing streams is as little as a norm is."""
    streams = model.residual_streams
    return 0.0 if streams is None else SITES_PER_BLOCK * _map_flops(streams, streams.site_shapes(model.hidden_size))


def end_flops(model: ModelConfig) -> float:
    """Operations per token of the maps behind the last block."""
    streams = model.residual_streams
    return 0.0 if streams is None else _map_flops(streams, streams.end_shapes(model.hidden_size))


def _map_flops(streams: ResidualStreamsConfig, shapes: Shapes) -> float:
    """A multiply and an add for every weight of a map; those of hyper-connections meet every stream by itself."""
    each = streams.count if streams.kind == "plain" else 1
    maps = ("fn", "down", "up", "inject", "alpha_map", "beta_map")
    return 2.0 * each * sum(shapes[name][0] * shapes[name][1] for name in maps if name in shapes)


def state_bytes(model: ModelConfig, element: int) -> int:
    """Bytes per token of what blocks hand to each other, and stages in a message."""
    streams = model.residual_streams
    return element * model.hidden_size if streams is None else streams.message_bytes(model.hidden_size, element)


def streams_bytes(model: ModelConfig, element: int) -> int:
    """Bytes per token of the streams of a site."""
    return element * (model.num_streams or 0) * model.hidden_size


def sites_kept(model: ModelConfig, element: int) -> float:
    """Bytes per token that backward needs of a block's sites, besides streams and the inputs of its branches' norms.

    They are the output that is written into streams, and weights in fp32. Gates keep normalised streams and logits, too,
    and two narrow vectors; their branches have no norm and keep what they read.
    """
    streams = model.residual_streams
    if streams is None:
        return 0.0
    n, hidden = streams.count, model.hidden_size
    match streams.kind:
        case "mhc" | "single_pass":
            # Products and their scale, the logits of the mix, three pairs of weights, and the mix.
            narrow, wide = 0, (n * n + 2 * n) + 1 + 4 * n + 2 * n * n
        case "gated":
            narrow, wide = 2 * n * hidden + 2 * streams.rank + hidden, 3 * n
        case "plain":
            narrow, wide = 0, 0
            if streams.dynamic:
                maps = n * (n + 2)
                wide = 2 * n + 2 * maps + n * (n + 1) + n
    return SITES_PER_BLOCK * float(element * (narrow + hidden) + _WIDE * wide)


def end_kept(model: ModelConfig, element: int, *, keeps_streams: bool) -> float:
    """Bytes per token that backward needs behind the last block, besides the input of the last norm.

    Args:
        keeps_streams: streams behind the last block are kept, and not mixed again.
    """
    streams = model.residual_streams
    if streams is None:
        return 0.0
    n, hidden = streams.count, model.hidden_size
    match streams.kind:
        case "mhc":
            return float(element * keeps_streams * n * hidden + _WIDE * (3 * n + 1))
        case "single_pass":
            return float(element * keeps_streams * n * hidden)
        case "gated":
            return float(element * ((2 + keeps_streams) * n * hidden + 2 * streams.rank) + _WIDE * n)
        case "plain":
            return 0.0


def sites_passing(model: ModelConfig, element: int) -> float:
    """Bytes per token that a site adds at its largest moment of backward: gradients of streams by two of their uses, and the
    sum; those of a gate are of two and in fp32, too, thrice."""
    streams = model.residual_streams
    if streams is None:
        return 0.0
    of_number = 2 * element + 3 * _WIDE if streams.kind == "gated" else 3 * element
    return float(streams.count * model.hidden_size * of_number)


def received_bytes(model: ModelConfig, element: int) -> int:
    """Bytes per token of a message that stays beside the streams that were copied out of it: with weights that travel, their
    columns part the streams."""
    streams = model.residual_streams
    return state_bytes(model, element) if streams is not None and streams.carries_read else 0
