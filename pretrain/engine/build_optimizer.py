"""Parameter groups, the rule of each, and the optimizers over them.

Every trainable parameter is in exactly one group. Groups exist on every rank, in the same order, even where they are
empty.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from kernels.common.main_grad import MainGradient
from kernels.common.table_gradient import gradient_of
from megamem.parameters.declaration import GroupName, group_of, is_on_every_stage, matrices_of, width_of
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig
from pretrain.config.updates import (
    ADAMW,
    MATRIX_GROUPS,
    MUON,
    ROW_WISE,
    TABLE_GROUPS,
    has_bf16_gradients,
    keeps_rows,
    matrix_update,
    table_update,
)
from pretrain.engine.chunks import unwrap
from pretrain.engine.megatron import optimizer_config, parameter_dtype
from pretrain.engine.muon import Muon, Team
from pretrain.engine.optimizer import MemoryDistributedOptimizer, MemoryOptimizer
from pretrain.engine.optimizer_shards import leaves_by_parameter
from pretrain.engine.tables.bf16_gradients import TableRoundings
from pretrain.engine.tables.read_rows import ReadRows, ReadTables, StoredRows
from pretrain.engine.tables.row_wise import OwnedRectangle, RowGroups, RowWise
from pretrain.engine.tables.stored_tables import stored_tables_of
from pretrain.engine.tables.trained_rows import choose_rows
from pretrain.engine.tables.value_offload import HostTables, host_adamw
from pretrain.engine.update_rules import MakeRule

# Parameters that tensor- and data-parallel ranks hold, and those that the memory group splits (experts and tables), are
# reduced over different replicas, so Megatron needs an optimizer for each.
DENSE_GROUPS: tuple[GroupName, ...] = ("backbone", "backbone_no_decay", "retrieval")
SPLIT_GROUPS: tuple[GroupName, ...] = ("experts", "values", "pre_values")


def assign_groups(chunks: Sequence[nn.Module]) -> dict[GroupName, list[nn.Parameter]]:
    """All trainable parameters of the chunks by the group that each was declared for."""
    assigned: dict[GroupName, list[nn.Parameter]] = {name: [] for name in (*DENSE_GROUPS, *SPLIT_GROUPS)}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                group = group_of(name, parameter)
                # Megatron keeps their gradients apart by this mark.
                assert getattr(parameter, "allreduce", True) == (group in DENSE_GROUPS), name
                assigned[group].append(parameter)
    grouped = [id(p) for parameters in assigned.values() for p in parameters]
    assert len(grouped) == len(set(grouped)), "parameter groups do not add up to the model"
    return assigned


def build_optimizer(
    config: RunConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups
) -> MemoryOptimizer:
    """One distributed optimizer for the dense parameters, and one for memory tables and experts if the model has any.

    Raises:
        ConfigError: DeepSpeed's operation cannot be compiled (`pretrain.engine.tables.value_offload.host_adamw`).
    """
    assigned = assign_groups(chunks)
    dense = _distributed_optimizer(config, chunks, groups, assigned, DENSE_GROUPS)
    optimizers: list[MemoryDistributedOptimizer | ReadTables] = [dense]
    by_row = config.model.memory is not None and keeps_rows(config.optimizer)
    split: tuple[GroupName, ...] = ("experts",) if by_row else SPLIT_GROUPS
    if (config.model.memory is not None and not by_row) or config.model.moe is not None:
        optimizers.append(_distributed_optimizer(config, chunks, groups, assigned, split))
    if by_row:
        optimizers += _of_rows(config, chunks, groups, assigned, dense.config)
    return MemoryOptimizer(optimizers, config.optimizer.value_clip_grad, _roundings(config, chunks, groups))


def _of_rows(
    config: RunConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ParallelGroups,
    assigned: dict[GroupName, list[nn.Parameter]],
    megatron_config: OptimizerConfig,
) -> Iterator[ReadTables]:
    """The optimizers of tables with gradients of rows: of those on the device, then of those in files.

    Raises:
        ConfigError: a file of reads is missing, or of another model.
    """
    stored = stored_tables_of(unwrap(chunk) for chunk in chunks)
    rules: dict[bool, MakeRule] = {}
    of_tables = _of_tables(config, chunks, groups)
    if config.optimizer.trained_rows is not None:
        banks = [bank for chunk in chunks for bank in unwrap(chunk).own_banks]
        first_rows = {table: place.first_row for table, place in of_tables["places"].items()}
        choose_rows(config.optimizer.trained_rows, banks, first_rows, groups)
    if stored is None or not all(memory.rows_are_known for memory in config.model.memories):
        rules[False] = partial(ReadRows, **of_tables)
    if stored is not None:
        rules[True] = partial(StoredRows, stored=stored, **of_tables)
    is_counted = groups.megatron.expt_dp.rank() == 0
    for in_files, make_rule in rules.items():
        param_groups: list[dict[str, Any]] = [
            # The schedule sets rates and decays.
            {
                "params": [table for table in assigned[name] if (stored is not None and table in stored) == in_files],
                "name": name,
                "rule": ROW_WISE.name,
                "lr": config.optimizer.lr,
                "weight_decay": 0.0,
            }
            for name in TABLE_GROUPS
        ]
        yield ReadTables(megatron_config, chunks, param_groups, make_rule, is_counted=is_counted)


def _roundings(
    config: RunConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups
) -> dict[nn.Parameter, TableRoundings]:
    """Roundings of gradients in bf16, which the tables then have, too."""
    if config.model.memory is None or not has_bf16_gradients(config.optimizer):
        return {}
    made = {}
    for table, place in _table_places(chunks):
        if table.requires_grad:
            owner = [groups.megatron.expt_dp.rank(), groups.pipeline_rank * is_on_every_stage(table)]
            made[table] = TableRoundings(config.seed, place.name, (place.first_row, place.first_column), owner)
            gradient = gradient_of(table)
            assert isinstance(gradient, MainGradient)
            gradient.roundings = made[table]
    return made


def _distributed_optimizer(
    config: RunConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ParallelGroups,
    assigned: dict[GroupName, list[nn.Parameter]],
    names: tuple[GroupName, ...],
) -> MemoryDistributedOptimizer:
    split = names is not DENSE_GROUPS
    settings = config.optimizer
    param_groups: list[dict[str, Any]] = [
        {"params": own, "name": name, "is_expert_parallel": split, "rule": rule, "rate_factor": factor}
        for name in names
        for rule, parameters in _by_rule(config, name, assigned[name])
        for factor, own in _by_width(config, name, rule, parameters)
    ]
    inner = None
    if any(group["params"] for group in param_groups):
        inner = _adamw(config)(
            param_groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
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
        make_rules={
            rule: _make_rule(rule, config, chunks, groups, split=split)
            for rule in dict.fromkeys(group["rule"] for group in param_groups)
            if rule is not None
        },
    )
    # The global norm leaves out the copies of a parameter on other tensor-parallel ranks. A table or an expert has
    # none: each rank of a stage owns other gradients.
    optimizer.tp_group = megatron.expt_tp if split else megatron.tp
    return optimizer


def _adamw(config: RunConfig) -> Callable[..., torch.optim.Optimizer]:
    if "adamw" in config.train.apex:
        # Decoupled decay is its default.
        apex: Callable[..., torch.optim.Optimizer] = pkgutil.resolve_name("apex.optimizers:FusedAdam")
        return apex
    # PyTorch's default implementation is eight times slower on CPU.
    return partial(torch.optim.AdamW, fused=True)


_ON_HOST = "adamw on the host"


def _by_rule(
    config: RunConfig, group: GroupName, parameters: list[nn.Parameter]
) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """Parameters of a group by the name of the rule that updates them: hidden matrices may have one of their own."""
    if group in MATRIX_GROUPS and matrix_update(config.optimizer) is MUON:
        yield None, [parameter for parameter in parameters if matrices_of(parameter) is None]
        yield MUON.name, [parameter for parameter in parameters if matrices_of(parameter) is not None]
    else:
        yield _rule_of(config, group), parameters


def _by_width(
    config: RunConfig, group: GroupName, rule: str | None, parameters: list[nn.Parameter]
) -> Iterator[tuple[float, list[nn.Parameter]]]:
    """Parameters of a group by the factor that muP gives AdamW's learning rate. Tables have none, and Muon has its own."""
    rules = config.model.width_rules
    if rule is not None or group in TABLE_GROUPS:
        yield 1.0, parameters
        return
    for factor in rules.rate_factors:
        yield factor, [parameter for parameter in parameters if rules.rate_factor(width_of(parameter)) == factor]


def _rule_of(config: RunConfig, group: GroupName) -> str | None:
    """The name of the rule that updates a group as one; None: Megatron's AdamW."""
    if group not in TABLE_GROUPS or config.model.memory is None:
        return None
    update = table_update(config.optimizer)
    if update is not ADAMW:
        return update.name
    return _ON_HOST if config.optimizer.value_offload == "cpu" else None


def _make_rule(
    rule: str,
    config: RunConfig,
    chunks: Sequence[DistributedDataParallel],
    groups: ParallelGroups,
    *,
    split: bool,
) -> MakeRule:
    """Maker of the rule of this name, for the parameters that the memory group splits or for the others."""
    settings, megatron = config.optimizer, groups.megatron
    if rule == MUON.name:
        # Experts are not split over tensor-parallel ranks.
        team = Team(megatron.expt_dp, 1) if split else Team(megatron.tp_dp_cp, megatron.tp.size())
        dtype = parameter_dtype(config)
        return partial(Muon, settings=settings, widths=config.model.width_rules, dtype=dtype, team=team)
    if rule == _ON_HOST:
        return partial(HostTables, adamw=host_adamw(settings))
    assert rule == ROW_WISE.name
    return partial(RowWise, **_of_tables(config, chunks, groups))


def _of_tables(config: RunConfig, chunks: Sequence[DistributedDataParallel], groups: ParallelGroups) -> dict[str, Any]:
    """Arguments of an update by row: settings, and the places of tables."""
    return {
        "settings": config.optimizer,
        "seed": config.seed,
        "places": dict(_table_places(chunks)),
        "groups": RowGroups(groups.table_columns, groups.megatron.expt_dp),
    }


def _table_places(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[nn.Parameter, OwnedRectangle]]:
    """Places of the ranks' tables in whole ones, as checkpoints have them."""
    leaves = leaves_by_parameter([unwrap(chunk).sharded_state_dict() for chunk in chunks])
    for chunk in chunks:
        for bank in unwrap(chunk).own_banks:
            for parameter in bank.parameters():
                (leaf,) = leaves[parameter]
                first_row, first_column = leaf.global_offset
                yield parameter, OwnedRectangle(leaf.key, first_row, first_column, leaf.global_shape[1], bank.kernels)
