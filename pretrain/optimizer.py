"""Parameter groups, and Megatron's distributed optimizer over them.

Every trainable parameter is in exactly one group. Groups exist on every rank, in the same order, even where they are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from torch import nn

from parallel.groups import ParallelGroups
from pretrain.checkpoint.optimizer_shards import leaves_by_parameter, num_updates_tensor, state_entries
from pretrain.config.schema import RunConfig
from pretrain.megatron import optimizer_config

GroupName = Literal["backbone", "backbone_no_decay", "retrieval", "experts", "values", "pre_values"]

# Parameters that tensor- and data-parallel ranks hold, and those that the memory group splits (experts and tables), are reduced over
# different replicas, so Megatron needs an optimizer for each.
DENSE_GROUPS: tuple[GroupName, ...] = ("backbone", "backbone_no_decay", "retrieval")
SPLIT_GROUPS: tuple[GroupName, ...] = ("experts", "values", "pre_values")


def group_of(name: str, parameter: nn.Parameter) -> GroupName:
    """The group of one parameter, by its name.

    Tables are `values` and `pre_values`; the matrices of a memory layer are `retrieval`; those of a mixture's experts are `experts`, decayed
    like the backbone; of the rest, vectors (norm gains) are not decayed.

    Args:
        name: dotted name in its chunk (with or without wrappers' prefixes).
        parameter: for its shape.
    """
    parts = name.split(".")
    if "banks" in parts:
        return "values" if parts[-1] == "values" else "pre_values"
    if parameter.dim() <= 1:
        return "backbone_no_decay"
    if "experts" in parts:
        return "experts"
    return "retrieval" if "memory" in parts else "backbone"


def assign_groups(chunks: Sequence[nn.Module]) -> dict[GroupName, list[nn.Parameter]]:
    """All trainable parameters of the chunks by group; asserts that the groups add up to the model."""
    assigned: dict[GroupName, list[nn.Parameter]] = {name: [] for name in (*DENSE_GROUPS, *SPLIT_GROUPS)}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                assigned[group_of(name, parameter)].append(parameter)
    grouped = [id(p) for parameters in assigned.values() for p in parameters]
    everything = {id(p) for chunk in chunks for p in chunk.parameters() if p.requires_grad}
    assert len(grouped) == len(set(grouped)) == len(everything), "parameter groups do not add up to the model"
    return assigned


class MemoryDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer over PyTorch's fused AdamW, with checkpoints of its own.

    Megatron-core 0.16.1 cannot load what it saves without TE or Apex, and matches groups by keys that do not tell ours apart. Here the run
    keeps the number of updates, the schedule sets hyper-parameters before every step, and a checkpoint holds tensors only, which are
    loaded in place.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all state that is not a tensor belongs to the run."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the tensors of `sharded_state_dict` were filled in place."""

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        """Entries `optimizer.state.<param | exp_avg | exp_avg_sq>.<parameter>` for this rank's share; views of the state itself."""
        if self.is_stub_optimizer:
            return {}
        self._allocate_state()
        leaves = leaves_by_parameter(model_sharded_state_dict)
        entries: dict[str, Any] = {}
        for parameter in self.model_param_group_index_map:
            owned = self._get_model_param_range_map(parameter)["param"]
            state = self._state_of(parameter)
            entries.update(state_entries(parameter, leaves[parameter], owned.start, owned.end, state))
        return entries

    def set_num_updates(self, num_updates: int) -> None:
        """Tell AdamW how many updates its moments have seen, for bias correction."""
        if not self.is_stub_optimizer:
            for parameter in self._main_parameters():
                self.optimizer.state[parameter]["step"] = num_updates_tensor(num_updates, parameter)

    def _main_parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _allocate_state(self) -> None:
        for parameter in self._main_parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = num_updates_tensor(0, parameter)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _state_of(self, model_parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """This rank's flat share of a parameter's main weights and moments."""
        index, order = self.model_param_group_index_map[model_parameter]
        parameter = self.optimizer.param_groups[index]["params"][order]
        state = self.optimizer.state[parameter]
        return {"param": parameter.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


class MemoryOptimizer(ChainedOptimizer):
    """The optimizers of dense and of split parameters as one: one global norm, one step, one checkpoint."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing: the tensors of `sharded_state_dict` were filled in place."""

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        """The entries of all parts; their names are the parameters' and do not collide."""
        return {
            key: entry
            for part in self.chained_optimizers
            for key, entry in part.sharded_state_dict(model_sharded_state_dict, is_loading).items()
        }

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Global gradient norm over all ranks, each parameter counted once.

        Squares are summed in fp64: an fp32 sum over a shard of a million elements is off by 1e-5, by another amount on every layout.
        """
        squares = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
        for part in self.chained_optimizers:
            for gradient in part.get_main_grads_for_grad_norm():
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        torch.distributed.all_reduce(squares, group=self.get_grad_stats_parallel_group())
        # Host sync: the norm decides whether there is an update at all.
        return float(squares.sqrt())

    def set_num_updates(self, num_updates: int) -> None:
        """See `MemoryDistributedOptimizer.set_num_updates`."""
        for part in self.chained_optimizers:
            part.set_num_updates(num_updates)


def build_optimizer(
    config: RunConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups
) -> ChainedOptimizer:
    """One distributed optimizer for the dense parameters, and one for memory tables and experts if the model has any."""
    assigned = assign_groups(chunks)
    parts = [_build_part(config, chunks, groups, assigned, DENSE_GROUPS)]
    if config.model.memory is not None or config.model.moe is not None:
        parts.append(_build_part(config, chunks, groups, assigned, SPLIT_GROUPS))
    return MemoryOptimizer(parts)


def _build_part(
    config: RunConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ParallelGroups,
    assigned: dict[GroupName, list[nn.Parameter]],
    names: tuple[GroupName, ...],
) -> MemoryDistributedOptimizer:
    split = names is SPLIT_GROUPS
    settings = config.optimizer
    param_groups = [{"params": assigned[name], "name": name, "is_expert_parallel": split} for name in names]
    inner = None
    if any(group["params"] for group in param_groups):
        inner = torch.optim.AdamW(
            param_groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            # The default implementation is eight times slower on CPU.
            fused=True,
        )
    megatron = groups.megatron
    optimizer = MemoryDistributedOptimizer(
        inner,
        optimizer_config(config, chunks[0].config.params_dtype),
        None,
        None,
        model_chunks=list(chunks),
        per_model_buffers={
            i: chunk.expert_parallel_buffers if split else chunk.buffers for i, chunk in enumerate(chunks)
        },
        data_parallel_group=megatron.expt_dp if split else megatron.dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=torch.distributed.get_rank(megatron.tp_ep_pp if split else megatron.mp),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = megatron.intra_dist_opt
    # The global norm counts a parameter once per tensor-parallel copy; each rank of a stage owns its own part of the gradient of a table
    # or an expert.
    optimizer.tp_group = megatron.expt_tp if split else megatron.tp
    return optimizer
