"""Places in a block where a memory acts: what each changes of the block, as a record that a family may bring itself.

The config of a memory names its slot (`MemoryConfig.slot_of`). `block_plan.py` resolves what is left of every block,
which building, costs, growth, exports and initialisation read; `megamem.blocks` lets the slot change the block's parts.
The slots around the feed-forward are here, as `placement` puts any family there, and those before a block, which families
share; others stand beside their families.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One place where a memory acts.

    Attributes:
        name: name in exported configurations and messages.
        edit_path: `module:function` that changes what the memory asks for, and nothing else, in a block's parts (a
            `megamem.backbone.parts.BlockEdit`); a path, because Megatron takes seconds to load.
        module: the module of a block that holds the memory, a `megamem.blocks.memory_sites.MemorySite`.
        has_ffn: the block has a feed-forward besides.
        has_output_projection: the block's attention has an output projection.
        is_inserted: the memory is all that its block adds to the residual stream. Such a block has neither a
            feed-forward nor the norm before it, and begins as the identity; the model's blocks are counted with it.
        needs_plain_attention: the memory reads what latent attention does not have.
        splits_latents: latent attention makes values of latents that the memory mixes, and keys of others.
        reads_streams: the memory has all residual streams in view where there are several, h [t, b, n, D], and not what a
            site reads of them. It returns as many, or one output [t, b, D] for all.
        is_exported: the model that Hugging Face's library loads (`pretrain.convert.huggingface`) has the slot.
    """

    name: str
    edit_path: str
    module: str = "mlp"
    has_ffn: bool = True
    has_output_projection: bool = True
    is_inserted: bool = False
    needs_plain_attention: bool = False
    splits_latents: bool = False
    reads_streams: bool = False
    is_exported: bool = False

    def __post_init__(self) -> None:
        assert not (self.is_inserted and self.has_ffn)

    @property
    def is_in_attention(self) -> bool:
        """True if the memory is called by attention, and not in place of the feed-forward or beside it."""
        return self.module.startswith("self_attention")


_AROUND_FFN = "megamem.blocks.slot_edits:edit_ffn"

BESIDE = Slot("beside", _AROUND_FFN, is_exported=True)
"""h + FFN(n) + Mem(n): `forward(n, inputs)` returns [t, b, D], of the normalised input n [t, b, D] of the block's
feed-forward, which is that of this rank's tokens. `inputs` are always those of the first argument's tokens."""
INSTEAD = Slot("instead", _AROUND_FFN, has_ffn=False, is_exported=True)
"""h + Mem(n); the block has no feed-forward."""
INSERTED = Slot("inserted", _AROUND_FFN, has_ffn=False, is_inserted=True, is_exported=True)
"""x + Mem(x + Attn(Norm(x))): all that an inserted block adds to the residual stream x, behind attention with its output
projection. `forward(n, inputs)` is given the sum as it is."""
SKIP = Slot("skip", _AROUND_FFN, is_exported=True)
"""h + FFN(n), and Mem(n) joins the residual stream after a later block."""

_BEFORE = "megamem.blocks.slot_edits:edit_entry"
ENTRY = Slot("entry", _BEFORE, module="entry", reads_streams=True, is_exported=True)
"""h + Mem(h) before the block's attention and its norm: `forward(h, inputs)` returns [t, b, D] for the residual stream
h [t, b, D] of this rank's tokens."""
EMBEDDING = Slot("embedding", _BEFORE, module="entry", is_exported=True)
"""Mem(h) before the first block, whose stream h [t, b, D] is the input embedding of this rank's tokens: `forward(h, inputs)`
returns what the blocks get in its place."""
