"""Megatron's mixture of experts as a baseline: experts numbered in checkpoints, router losses free of the layout.

Legend: s sequence length and b sequences of this rank, T = s b tokens, G groups of g sequences, D hidden size, E
experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from megamem.backbone.matrices import backbone_matrices
from megamem.config.width import Width
from megamem.parameters.declaration import ReducedOver, declare, parameter_device

ROUTER_LOSS_NAMES = ("moe_balance", "moe_z")
"""The router's losses by their names in metrics."""


def moe_spec(expert: MLPSubmodules, balance_sequences: int) -> ModuleSpec:
    """A mixture of experts for the `mlp` slot, given the linears of one expert; for the rest see `Router`."""
    experts = ModuleSpec(module=Experts, submodules=expert)
    router = partial(Router, balance_sequences=balance_sequences)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=router))


class Experts(SequentialMLP):
    """This rank's experts, one after the other.

    Gradients are reduced over the stage whatever the size of the expert-parallel group. Megatron does so in groups of
    several ranks only; in a group of one, with tensor parallelism, every rank of a stage has every expert and has seen
    other tokens, and reducing over data-parallel ranks alone would leave the copies with different gradients.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
        **megatron: Any,
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **megatron)
        matrices = backbone_matrices(self)
        for parameter in self.parameters():
            declare(parameter, "experts", reduced_over=ReducedOver.STAGE, matrices=matrices.get(parameter))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Entries `<prefix><expert>.linear_fc1.weight`, each expert a tensor of its own under its global number.

        Megatron stacks the experts of a block into one tensor. Apart, each draws its own initial weights from the
        generator that is keyed by names, and its optimizer state is cut like that of any matrix.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        entries: ShardedStateDict = {}
        first = self.ep_group.rank() * self.num_local_experts
        for index, expert in enumerate(self.local_experts):
            local, everywhere = f"{prefix}local_experts.{index}.", f"{prefix}{first + index}."
            of_expert = expert.sharded_state_dict(local, sharded_offsets, metadata)
            replace_prefix_for_sharding(of_expert, local, everywhere)
            for entry in of_expert.values():
                entry.replica_id = (*entry.replica_id[:2], self.dp_group.rank())
            entries.update(of_expert)
        return entries


class Router(TopKRouter):
    """Megatron's top-k router, with losses whose weight does not depend on the layout or on the number of microbatches.

    Gradients are summed over microbatches and over all ranks that hold tokens, and divided once per step by the number
    of targets, so a microbatch's loss has to enter with its weight times its tokens. Megatron takes the rank's tokens
    for the microbatch's, which divides both losses by the size of the tensor- and context-parallel group.

    The balance loss is a product of statistics of `balance_sequences` consecutive sequences, for the reasons that
    `megamem.layers.losses` gives: with 1 it is Megatron's seq_aux_loss, with all of a microbatch its aux_loss.

    Attributes:
        balance_sequences: number of consecutive sequences; divides those of a microbatch.
        sums: [3] fp64: tokens of this rank since `begin_step`, and per loss of `ROUTER_LOSS_NAMES` the sum of value x
            tokens.
    """

    sums: Tensor
    weight: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        balance_sequences: int,
        **megatron: Any,
    ) -> None:
        super().__init__(config, pg_collection=pg_collection, **megatron)
        self.balance_sequences = balance_sequences
        # Megatron allocates it on the CPU and moves it in the first forward.
        weight: Any = nn.Parameter(self.weight.detach().to(parameter_device(config)))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight
        declare(self.weight, "backbone", reduced_over=ReducedOver.TOKENS, width=Width.INPUTS)
        self.begin_step()

    def begin_step(self) -> None:
        """Start the sums anew."""
        self.sums = torch.zeros(1 + len(ROUTER_LOSS_NAMES), dtype=torch.float64, device=self.weight.device)

    def gating(self, input: Tensor) -> Tensor:
        """Logits [s, b, E] of tokens [s, b, D] in the router's own precision. (Megatron's needs Transformer Engine.)"""
        wide = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        return F.linear(input.to(wide), self.weight.to(wide))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Megatron's, for logits [s, b, E]; counts the tokens once per microbatch, as the losses do."""
        if self.training and torch.is_grad_enabled():
            self.sums[0] += logits.shape[0] * logits.shape[1]
        probs, routing_map = super().routing(logits, padding_mask)
        return probs, routing_map

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z-loss to the logits [T, E]; over the ranks of a microbatch it sums to weight x tokens x mean."""
        weight = self.config.moe_z_loss_coeff
        if weight is None or not self.training or not torch.is_grad_enabled():
            return logits
        mean = z_loss_func(logits, 1.0)
        self.sums[2] += mean.detach() * logits.shape[0]
        attached: Tensor = MoEAuxLossAutoScaler.apply(logits, mean * (weight * logits.shape[0]))
        return attached

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Megatron's, of groups of sequences in the place of sequences: probabilities and choices are [T, E]."""
        num_groups, left = divmod(bsz, self.balance_sequences)
        assert left == 0, f"{bsz} sequences, of which {self.balance_sequences} are taken together"

        def one_by_one(values: Tensor) -> Tensor:
            """[s g, G E]: the tokens of a group's g sequences as if they were one sequence's."""
            return (
                values.view(seq_length, num_groups, self.balance_sequences, -1).transpose(1, 2).flatten(0, 1).flatten(1)
            )

        attached: Tensor = super()._apply_seq_aux_loss(
            probs,
            one_by_one(scores_for_aux_loss),
            one_by_one(routing_map),
            seq_length * self.balance_sequences,
            num_groups,
            with_padding_mask,
        )
        return attached

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: torch.distributed.ProcessGroup,
        **_megatron: Any,
    ) -> Tensor:
        """Attach the balance loss to the router's probabilities, `activation` [T, E].

        Args:
            aux_loss_coeff: its weight.
            aux_loss: weight times this rank's share of the microbatch's loss: the sum over `reduce_group` is the whole.
            reduce_group: the ranks that hold the microbatch's tokens, equally many each.
        """
        scaled = aux_loss * (activation.shape[0] * reduce_group.size())
        self.sums[1] += scaled.detach() / aux_loss_coeff
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, scaled)
        return attached
