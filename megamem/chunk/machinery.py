"""Machinery that a rank's model chunks compute with: its groups, kernels and streams. What they compute does not depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection

from kernels.select import Kernels
from megamem.attention.core import SdpaCoreAttention
from megamem.backbone.norm import RMSNorm
from megamem.banks.bank import MakeBank
from megamem.chunk.halo import UNCUT, Halo
from megamem.chunk.side_stream import SideStream


@dataclass(frozen=True)
class Machinery:
    """Choices of the layout and the machine.

    Attributes:
        groups: Megatron's groups of ranks.
        make_bank: builds a bank, or this rank's part of it.
        attention_core: class of attention's core where Transformer Engine does not attend.
        norm: class of the backbone's norms, where Transformer Engine brings none.
        kernels: kernels of the layers' retrieval and of the backbone; the banks have theirs.
        side_stream: stream on which the memory of a block runs beside its feed-forward.
        token_halo: reaches the tokens before those of this context-parallel rank.
        hidden_halo: reaches the hidden states before those of this rank, between the tensor-parallel regions.
    """

    groups: ProcessGroupCollection
    make_bank: MakeBank
    attention_core: type[SdpaCoreAttention]
    norm: type[RMSNorm]
    kernels: Kernels
    side_stream: SideStream
    token_halo: Halo = UNCUT
    hidden_halo: Halo = UNCUT
