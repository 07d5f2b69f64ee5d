"""What every memory layer has in common: its place in the model, its lookup, and the way from the hidden state to its output.

Legend: s sequence length and b sequences of this rank, T = s b tokens, D hidden size, H heads, K retrieved, J = H K, C scores per entry,
V value dim, P pre-value dim, B sums per token (virtual blocks with a projection each; mostly 1).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.bank import TableLookup
from megamem.config import MemoryConfig
from megamem.inputs import Inputs
from megamem.losses import AuxiliaryLosses
from megamem.parameters import ReducedOver, declare
from megamem.placement import parameter_device
from megamem.retrieval.retrieved import Retrieved
from megamem.sharing import LayerView
from megamem.usage import LayerUsage


class MemoryLayer(MegatronModule):
    """Retrieves K values per token and head and brings their weighted sum back to the residual stream.

    A variant says how it retrieves (`retrieve`), which rows stand behind its slots (`locate`), what its pre-values are multiplied
    with (`pre_input`) and how the sum is projected (`project`).

    The weights are replicated over tensor-parallel ranks, each of which sees its own share of the sequence; so Megatron sums their
    gradients over those too. The tables belong to the model and are reached through `lookup`.

    Attributes:
        cores: [C, H, R, R], the Tucker cores; None in layers without.
        losses: the auxiliary losses; None while all are off.
        usage: set while the run observes how its memory is used.
    """

    cores: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        memory: MemoryConfig,
        view: LayerView,
        lookup: TableLookup,
        *,
        kernels: Kernels,
        num_bank_rows: int,
        name: str,
        seed: int,
        token_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Allocate the weights; `megamem.initialisation` fills them.

        Args:
            config: Megatron's config of the model.
            memory: this layer's config.
            view: the window of the bank that this layer sees.
            lookup: the bank; kept outside of the module tree, because it belongs to the model.
            kernels: the selections.
            num_bank_rows: rows of the bank, at which the window wraps around.
            name: the layer's global name, which keys its shuffle.
            seed: the run's seed.
            token_group: tensor- and context-parallel ranks, which hold the other tokens of a microbatch; None: this rank holds all of them.
        """
        super().__init__(config=config)
        self.name = name
        self.memory, self.view, self.lookup, self.num_bank_rows = memory, view, lookup, num_bank_rows
        self.kernels = kernels
        self.epsilon = config.layernorm_epsilon
        self.losses = (
            AuxiliaryLosses(memory, token_group, parameter_device(config)) if memory.has_auxiliary_losses else None
        )
        self.usage: LayerUsage | None = None
        self._build(config.hidden_size, seed)

    @abstractmethod
    def _build(self, hidden_size: int, seed: int) -> None:
        """Allocate this variant's weights and buffers."""

    @abstractmethod
    def retrieve(self, x: Tensor) -> Retrieved:
        """Slots and scores of the tokens `x` [T, D]; scores are fp32 (fp64 for fp64 inputs)."""

    @abstractmethod
    def locate(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of the bank behind the slots of the grid, and the sum, in [0, B), that each one's value belongs to (None if B is 1)."""

    @abstractmethod
    def pre_input(self, x: Tensor) -> Tensor | None:
        """What the pre-values are multiplied with, [T, P] of the tokens `x` [T, D]; None without pre-values."""

    @abstractmethod
    def project(self, values: Tensor, x: Tensor) -> Tensor:
        """The output [T, D] from the weighted values [T, B V] of the tokens `x` [T, D]."""

    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The memory's contribution to the residual stream.

        Args:
            hidden: [s, b, D], the normalised input of the block's feed-forward.
            inputs: the tokens behind it, which none of these variants asks for.

        Returns:
            [s, b, D].
        """
        x = hidden.flatten(0, 1)
        found = self.retrieve(x)
        rows, blocks = self.locate(found.slots.flatten(1))
        scores = found.scores.flatten(1, 2).to(x.dtype)
        values = self.lookup.read(rows, scores, self.pre_input(x), blocks, self.memory.num_value_blocks)
        out = self.project(values, x)
        if torch.is_grad_enabled():
            # Once per microbatch: the first forward of a recomputed block runs without gradients, as does evaluation.
            if self.losses is not None:
                out = self.losses.inject(out, self.cores, found.stage_scores, (found.row_ids, found.column_ids))
            if self.usage is not None:
                self.usage.record(rows, found.scores, out)
        return out.view_as(hidden)

    def _weight(self, *shape: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=parameter_device(self.config)))
        # Gains and biases are not decayed.
        declare(weight, "retrieval" if len(shape) > 1 else "backbone_no_decay", reduced_over=ReducedOver.TOKENS)
        return weight
