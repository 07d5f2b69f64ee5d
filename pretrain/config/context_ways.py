"""The ways of attention across cut sequences: the choice of a run, bytes sent and bytes kept.

Legend: CP ranks of the group, T tokens of a rank before tensor parallelism splits them, n query heads and g key/value
heads of a tensor-parallel rank, g' = max(g, CP) key/value heads that are sent where heads are exchanged, d head
dimension, e bytes per element, a = max(e, 4) bytes of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megamem.config.model import ModelConfig
from pretrain.config.schema import RunConfig

Way: TypeAlias = Literal["gather", "heads", "ring"]
WAYS: tuple[Way, ...] = ("gather", "heads", "ring")
_NORMALISER = 4


@dataclass(frozen=True)
class ContextCosts:
    """Bytes of the attention of one layer and microbatch on one rank.

    Attributes:
        forward: bytes sent to other ranks in a forward pass; it receives as much.
        backward: bytes sent to other ranks in a backward pass.
        kept: bytes kept for backward: queries, keys, values, outputs, and normalisers where
            `megamem.attention.blockwise` attends.
    """

    forward: int
    backward: int
    kept: int


def context_costs(
    model: ModelConfig, way: Way, *, context_size: int, tensor_size: int, num_tokens: int, element_bytes: int
) -> ContextCosts:
    """Cost of a way for T = `num_tokens` of CP = `context_size` ranks, per layer and pass.

    | way | forward | backward | kept |
    |---|---|---|---|
    | gather | (CP - 1) T 2 g d e | the same | T (2 n + CP 2 g) d e |
    | heads | (CP - 1) / CP T (2 n + 2 g') d e | the same | T (2 n + 2 g') d e |
    | ring | (CP - 1) T 2 g d e | (CP - 1) T 2 g d (e + a) | T (2 n + 2 g) d e |

    and normalisers, T n of 4 bytes.

    Args:
        model: a model, whose heads are split over `tensor_size` tensor-parallel ranks.
        num_tokens: T.
        element_bytes: e, of activations.
    """
    n, g = model.num_attention_heads // tensor_size, max(1, model.query_groups // tensor_size)
    others, vector = context_size - 1, num_tokens * model.attention_head_dim
    normalisers = num_tokens * n * _NORMALISER
    match way:
        case "gather":
            sent = others * vector * 2 * g * element_bytes
            return ContextCosts(sent, sent, vector * (2 * n + context_size * 2 * g) * element_bytes + normalisers)
        case "heads":
            heads = 2 * n + 2 * max(g, context_size)
            sent = others * vector * heads * element_bytes // context_size
            return ContextCosts(sent, sent, vector * heads * element_bytes + normalisers)
        case "ring":
            pairs = vector * 2 * g
            return ContextCosts(
                others * pairs * element_bytes,
                others * pairs * (element_bytes + max(element_bytes, 4)),
                (vector * 2 * n + pairs) * element_bytes + normalisers,
            )


def run_costs(config: RunConfig, way: Way) -> ContextCosts:
    """Cost of a way in a layer of a run, per microbatch."""
    layout, train = config.parallel, config.train
    return context_costs(
        config.model,
        way,
        context_size=layout.context,
        tensor_size=layout.tensor,
        num_tokens=train.micro_batch_size * train.sequence_length // layout.context,
        element_bytes=train.element_bytes,
    )


def heads_problem(config: RunConfig) -> str | None:
    """Reason that a run's heads cannot be exchanged over its context-parallel ranks; None: they can."""
    model, layout = config.model, config.parallel
    context = layout.context
    n, g = model.num_attention_heads // layout.tensor, max(1, model.query_groups // layout.tensor)
    if n % context:
        return f"{n} query heads of a tensor-parallel rank are no multiple of parallel.context {context}"
    if g % context == 0:
        return None
    if model.implementation == "transformer_engine":
        return f"Transformer Engine wants a multiple of parallel.context {context} for key/value heads too, not {g}"
    if context % g:
        return f"of {g} key/value heads of a tensor-parallel rank and parallel.context {context}, neither divides the other"
    return None


def context_way(config: RunConfig) -> Way:
    """The way that a run takes.

    `auto` is `heads` where the heads can be exchanged and that sends no more bytes in a forward and a backward pass
    than `ring`, else `ring`. `gather` is only taken when it is asked for: its kept bytes do not shrink with CP.
    Transformer Engine's own default is `ring`.
    """
    asked = config.parallel.context_attention
    if asked != "auto":
        return asked
    if config.model.implementation == "transformer_engine" or heads_problem(config) is not None:
        return "ring"
    heads, ring = (run_costs(config, way) for way in ("heads", "ring"))
    return "heads" if heads.forward + heads.backward <= ring.forward + ring.backward else "ring"
