"""Bytes that a mixture of experts with a balanced router sends and keeps, by closed formulas.

Legend: T tokens of a microbatch on a rank, K experts per token, E experts, G ranks that share them, D hidden size, F
inner width of an expert, e bytes per element.
"""

from __future__ import annotations

from megamem.config.model import ModelConfig, MoEConfig
from pretrain.config.schema import RunConfig
from pretrain.planning.counts.pipeline_stages import Division, Stage

_COUNT, _PROBABILITY = 8, 4


def dispatched_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes that a rank sends per microbatch for tokens on their way to experts and back, in all passes.

    Forward: T K (D e + 4) to the experts, with a probability each, and R D e back, of which this rank's own do not leave
    it; and E counts of 8 bytes to each other rank. Backward T K D e, and R (D e + 4) back. R, the tokens that come to it,
    is T K too but for the remainder of T K / E, which the first experts get: this is their rank, and of either R / G stay.
    """
    moe, group = config.model.moe, config.parallel.memory
    if moe is None or group == 1:
        return 0.0
    forwards = 2 if config.train.recompute == "full" else 1
    rows, width = division.rank_tokens * moe.top_k, config.model.hidden_size * config.train.element_bytes
    each, rest = divmod(rows, moe.num_experts)
    mine = moe.num_experts // group
    received = group * (mine * each + min(mine, rest))
    there, back = rows - received / group, received - received / group
    of_passes = (forwards + 1) * (there + back) * width + (forwards * there + back) * _PROBABILITY
    counts = forwards * (group - 1) * moe.num_experts * _COUNT
    return stage.blocks.ffns * (of_passes + counts)


def experts_kept(model: ModelConfig, moe: MoEConfig, tokens: int, element: int) -> float:
    """Bytes that backward of one block needs of its mixture.

    For every token and expert that it is sent to: the input, gate and up, their product without and with the router's
    weight, and where it came from. For every token: the router's input in fp32, and its logits, probabilities and maps.
    Once: the router's weights in fp32.
    """
    rows = tokens * moe.top_k
    of_router = tokens * (4 * model.hidden_size + 22 * moe.num_experts + 4) + 4 * moe.num_experts * model.hidden_size
    return float(rows * (element * (model.hidden_size + 4 * moe.expert_ffn_hidden_size) + 20) + of_router)


def experts_backward(model: ModelConfig, moe: MoEConfig, tokens: int, element: int) -> float:
    """Bytes that a mixture's backward adds at its peak: gradients of what was sent, before and after each order."""
    return 4.0 * tokens * moe.top_k * model.hidden_size * element
