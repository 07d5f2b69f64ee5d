"""Places in the backbone where a memory acts.

A memory's config names the slot (`MemoryConfig.slot_of`), and `megamem.backbone` gives it its module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from megamem.spans import Span

if TYPE_CHECKING:
    # Megatron takes seconds to load, and a config names its slot without it.
    from megatron.core.transformer.module import MegatronModule


class Slot(Enum):
    """Place where a memory acts, and the arguments of its layer's `forward`.

    n is the normalised input of a block's feed-forward, [t, b, D] of this rank's tokens; heads are those of this
    tensor-parallel rank, of all s tokens of its context-parallel rank. `inputs` are always those of the first
    argument's tokens.
    """

    BESIDE = "beside"
    """h + FFN(n) + Mem(n): `forward(n, inputs)` returns [t, b, D]."""
    INSTEAD = "instead"
    """h + Mem(n); the block has no feed-forward."""
    INSERTED = "inserted"
    """x + Mem(x + Attn(Norm(x))): all that an inserted block adds to the residual stream x, behind attention with its
    output projection. `forward(n, inputs)` is given the sum as it is: the block has neither a second norm nor a
    feed-forward. The model's blocks are counted with it."""
    STREAM_AND_HEADS = "stream_and_heads"
    """x + Mem(x + heads): as `INSERTED`, without an output projection; the heads of all ranks together are as wide as x."""
    PROJECTED = "projected"
    """x + Mem(Attn(Norm(x))): as `INSERTED`, without the residual stream in what the memory is given."""
    SKIP = "skip"
    """h + FFN(n), and Mem(n) joins the residual stream after a later block."""
    VALUES = "values"
    """`forward(values, inputs, hidden)` returns attention's values [s, b, g, d]; `hidden` is its input [t, b, D]. In
    latent attention these are the latents that values are made of, [t, b, d_c]; keys are made of them as they were."""
    LATENTS = "latents"
    """`forward(latents, inputs, hidden)` returns the latents [t, b, d_c] that keys and values are made of, of latent
    attention's own; `hidden` is its input [t, b, D]."""
    HEADS = "heads"
    """`forward(heads, inputs)` returns what is added to the heads' outputs [s, b, n d] before the output projection."""
    BLOCK = "block"
    """h + Mem(heads): the memory takes the place of the output projection and of the feed-forward, and is all that such
    a block adds to the residual stream (an inserted block). `forward(heads, inputs)` returns [s, b, n, d]; the heads of
    all ranks together are as wide as h. The model's blocks are counted with it."""

    @property
    def is_inserted(self) -> bool:
        """True if a memory here is all that its block adds."""
        return self in (Slot.INSERTED, Slot.STREAM_AND_HEADS, Slot.PROJECTED, Slot.BLOCK)

    @property
    def has_output_projection(self) -> bool:
        """True if the attention of its block has an output projection."""
        return self not in (Slot.STREAM_AND_HEADS, Slot.BLOCK)

    @property
    def has_ffn(self) -> bool:
        """True if the block has a feed-forward besides."""
        return self is not Slot.INSTEAD and not self.is_inserted

    @property
    def module(self) -> str:
        """The module of a block that holds the memory."""
        match self:
            case Slot.VALUES | Slot.LATENTS:
                return "self_attention"
            case Slot.HEADS | Slot.BLOCK:
                return "self_attention.core_attention"
        return "mlp"


@dataclass(frozen=True)
class Site:
    """One memory of the model.

    Attributes:
        slot: where it acts.
        span: the block that it reads in, and the one after which its output joins; the same in every slot but `SKIP`.
        make_memory: builds its layer.
        reads_once: whether the layers of a chunk read their tables together.
        layer_norm: whether LayerNorm stands before attention (of inserted blocks).
    """

    slot: Slot
    span: Span
    make_memory: Callable[[], MegatronModule]
    reads_once: bool = False
    layer_norm: bool = False

    def __post_init__(self) -> None:
        assert self.span.is_skip == (self.slot is Slot.SKIP)
