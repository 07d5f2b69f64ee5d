"""What a mixture of experts sends and keeps, by closed formulas, where its router sends every expert as many tokens.

Legend: T tokens of a microbatch on a rank, K experts per token, E experts, G ranks that share them, D hidden size, F
inner width of an expert, e bytes per element.
"""

from __future__ import annotations

from pretrain.config.schema import RunConfig
from pretrain.costs.stages import Division, Stage

_COUNT, _PROBABILITY = 8, 4


def dispatched_bytes(config: RunConfig, stage: Stage, division: Division) -> float:
    """Bytes that a rank sends per microbatch for tokens on their way to experts and back, in all passes.

    Forward: T K (D e + 4) to the experts, with a probability each, and T K D e back, of which (G - 1) / G leave the
    rank; and E counts of 8 bytes to each other rank. Backward the same, without the counts.
    """
    moe, group = config.model.moe, config.parallel.memory
    if moe is None or group == 1:
        return 0.0
    forwards = 2 if config.train.recompute == "full" else 1
    rows, width = division.rank_tokens * moe.top_k, config.model.hidden_size * config.train.element_bytes
    of_pass = rows * (2 * width + _PROBABILITY) * (group - 1) / group
    counts = forwards * (group - 1) * moe.num_experts * _COUNT
    return _num_mixtures(stage) * ((forwards + 1) * of_pass + counts)


def _num_mixtures(stage: Stage) -> int:
    return stage.num_blocks
