"""Megatron's distributed optimizer with rules beside AdamW, and those of a run as one.

`pretrain.engine.build_optimizer` makes them. Groups that another rule than AdamW updates are empty to Megatron
(`pretrain.engine.update_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from megamem.parameters.declaration import GroupName
from pretrain.config.updates import TABLE_GROUPS
from pretrain.engine.gradient_norms import GradientNorms, scale_to, sum_in_any_order, sums_of_squares
from pretrain.engine.optimizer_shards import leaves_by_parameter, state_entries
from pretrain.engine.tables.bf16_gradients import TableRoundings
from pretrain.engine.tables.read_rows import ReadTables
from pretrain.engine.update_rules import MakeRule, ReplicaRanges, Share, UpdateRule
from pretrain.engine.weight_gathering import start_gathering
from pretrain.errors import ConfigError

UpdatesOf = Callable[[nn.Parameter], int]
"""Number of updates that the state of a parameter has seen."""


class MemoryDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer over PyTorch's fused AdamW, with checkpoints and other rules of its own.

    Megatron-core 0.16.1 cannot load what it saves without TE or Apex, and matches groups by keys that do not tell ours
    apart. Here the run keeps the number of updates, the schedule sets hyper-parameters before every step, and a
    checkpoint holds tensors only, which are loaded in place.

    Attributes:
        rules: rules that update this rank's shares of the groups that have one.
    """

    def __init__(
        self, inner: torch.optim.Optimizer | None, *arguments: Any, make_rules: Mapping[str, MakeRule], **keywords: Any
    ) -> None:
        """See `DistributedOptimizer`.

        Args:
            inner: optimizer whose groups have a `rule`: None, or one of `make_rules`, which then updates the group. To
                Megatron such a group is empty.
        """
        # Before Megatron puts this rank's ranges in the place of parameters.
        groups = inner.param_groups if inner is not None else []
        self._rule_of: dict[nn.Parameter, str | None] = {p: group["rule"] for group in groups for p in group["params"]}
        super().__init__(inner, *arguments, **keywords)
        # Apex's counts in its groups.
        self._counts_by_parameter = isinstance(inner, torch.optim.AdamW)
        self.rules = (
            () if self.is_stub_optimizer else tuple(self._make(name, rule) for name, rule in make_rules.items())
        )
        self._ruled: dict[nn.Parameter, tuple[UpdateRule, Share]] = {
            share.parameter: (rule, share) for rule in self.rules for share in rule.shares
        }

    def _make(self, name: str, make_rule: MakeRule) -> UpdateRule:
        # PyTorch has made new groups of Megatron's: the schedule sets those.
        groups = [
            (ranges["params"], group)
            for ranges, group in zip(self.opt_group_ranges, self.param_groups, strict=True)
            if group["rule"] == name
        ]
        shares = [self._share_of(parameter, group) for parameters, group in groups for parameter in parameters]
        return make_rule(shares, [*self._spreads(name)])

    def _spreads(self, rule: str) -> Iterator[ReplicaRanges]:
        for buffer in self.buffers:
            for parameter, (start, _, bucket_id) in buffer.param_index_map.items():
                if self._rule_of[parameter] == rule:
                    bucket = buffer.buckets[bucket_id]
                    num_replicas = self.data_parallel_group.size()
                    yield ReplicaRanges.over(num_replicas, parameter, start - bucket.offset, bucket.grad_data.numel())

    @classmethod
    def _build_model_and_main_param_groups(
        cls, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: list[dict[str, Any]], config: Any
    ) -> Any:
        """Megatron's main weights for the groups without a rule; empty lists for the others."""
        its_own = [{**ranges, "params": []} if _has_rule(ranges) else ranges for ranges in opt_group_ranges]
        return super()._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, its_own, config)

    def sharded_state_dict(self, model_sharded_state_dict: Any) -> dict[str, Any]:
        """Entries `optimizer.state.<param, or what the update keeps>.<parameter>` for this rank's share.

        They are views of the state itself, so that loading fills it in place.
        """
        if self.is_stub_optimizer:
            return {}
        self._allocate_state()
        leaves = leaves_by_parameter(model_sharded_state_dict)
        entries: dict[str, Any] = {}
        for parameter in self.model_param_group_index_map:
            if parameter in self._ruled:
                rule, share = self._ruled[parameter]
                entries.update(rule.state_entries(share, leaves[parameter]))
            else:
                owned = self._get_model_param_range_map(parameter)["param"]
                state = self._state_of(parameter)
                entries.update(state_entries(parameter, leaves[parameter], owned.start, owned.end, state))
        return entries

    def gradients(self, *, counted_once: bool) -> Iterator[tuple[GroupName, Tensor]]:
        """This rank's shares of the reduced gradients, with their groups.

        Args:
            counted_once: leave out what another rank counts in the global norm.
        """

        def counts(parameter: Tensor) -> bool:
            return not counted_once or (
                param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, self.tp_group)
            )

        for group in self.param_groups:
            for parameter in group["params"]:
                if counts(parameter):
                    yield group["name"], parameter.grad
        for parameter, (_, share) in self._ruled.items():
            if counts(parameter):
                yield share.group["name"], share.gradient

    def main_weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The model's parameters that this rank steps a share of, with the flat main weights of that share."""
        if not self.is_stub_optimizer:
            for parameter in self.model_param_group_index_map:
                if parameter in self._ruled:
                    rule, share = self._ruled[parameter]
                    yield parameter, rule.main_weights(share)
                else:
                    yield parameter, self._main_weights_of(parameter).detach()

    def device_state(self) -> Iterator[Tensor]:
        """Main weights and state on this rank's device; in fp32 the main weights are the model's own."""
        if not self.is_stub_optimizer:
            for parameter, state in self.optimizer.state.items():
                yield parameter
                yield from (value for value in state.values() if isinstance(value, Tensor))
            for rule in self.rules:
                yield from rule.device_state()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update main weights and this rank's shares of the model's, which `MemoryOptimizer` gathers."""
        stepped = bool(MixedPrecisionOptimizer.step_with_ready_grads(self))
        for rule in self.rules:
            rule.step()
        return stepped

    def set_num_updates(self, updates_of: UpdatesOf) -> None:
        """Say how many updates the state of each of the model's parameters has seen, for bias correction.

        Raises:
            ConfigError: parameters of a group have seen different numbers, and Apex counts by group.
        """
        if self.is_stub_optimizer:
            return
        self._allocate_state()
        of_groups: dict[int, set[int]] = {}
        for parameter, (group, _) in self.model_param_group_index_map.items():
            if parameter in self._ruled:
                rule, share = self._ruled[parameter]
                rule.set_num_updates(share, updates_of(parameter))
            elif self._counts_by_parameter:
                self.optimizer.state[self._main_weights_of(parameter)]["step"].fill_(updates_of(parameter))
            else:
                of_groups.setdefault(group, set()).add(updates_of(parameter))
        for index, numbers in of_groups.items():
            if len(numbers) > 1:
                raise ConfigError(
                    "train.apex has adamw, which counts the updates of a group of parameters together, and parts of "
                    f"{self.param_groups[index]['name']} have seen {' and '.join(map(str, sorted(numbers)))} of them in "
                    "stages that trained some layers alone: remove adamw from train.apex"
                )
            (self.optimizer.param_groups[index]["step"],) = numbers

    def _copy_main_params_to_model_params(self) -> None:
        """Round the main weights, as Megatron's does one by one, by one kernel for many."""
        if self.is_stub_optimizer:
            return
        shares: list[Tensor] = []
        mains: list[Tensor] = []
        groups = zip(
            (*self.shard_fp32_from_float16_groups, *self.shard_fp32_groups),
            (*self.model_float16_groups, *self.model_fp32_groups),
            strict=True,
        )
        for of_group, parameters in groups:
            for main, parameter in zip(of_group, parameters, strict=True):
                place = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                index, _, bucket = self.model_param_gbuf_map[parameter]
                shares.append(self.buffers[index].buckets[bucket].param_data.view(-1)[place.start : place.end])
                mains.append(main)
        if shares:
            torch._foreach_copy_(shares, mains)

    @torch.no_grad()
    def set_weights_from_main(self) -> None:
        """Round the main weights to this rank's shares of the model's, as after an update."""
        self._copy_main_params_to_model_params()
        for rule in self.rules:
            rule.set_weights_from_main()

    def _allocate_state(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    if self._counts_by_parameter:
                        # As the fused implementation keeps it: fp32, beside the parameter.
                        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _main_weights_of(self, model_parameter: nn.Parameter) -> nn.Parameter:
        """The key of a parameter's state in the optimizer under Megatron's."""
        index, order = self.model_param_group_index_map[model_parameter]
        found: nn.Parameter = self.optimizer.param_groups[index]["params"][order]
        return found

    def _state_of(self, model_parameter: nn.Parameter) -> dict[str, Tensor]:
        """This rank's flat share of a parameter's main weights and moments."""
        parameter = self._main_weights_of(model_parameter)
        state = self.optimizer.state[parameter]
        return {"param": parameter.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def _share_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> Share:
        owned = self._get_model_param_range_map(parameter)["param"]
        mine = slice(owned.start, owned.end)
        # Set by Megatron's DDP: a view of its buffer.
        gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return Share(parameter, owned.start, group, parameter.detach().view(-1)[mine], gradient.view(-1)[mine])


def _has_rule(ranges: dict[str, Any]) -> bool:
    return ranges["orig_group"]["rule"] is not None


class MemoryOptimizer(ChainedOptimizer):
    """The optimizers of dense and of split parameters as one: one global norm, one step, one checkpoint."""

    def __init__(
        self,
        optimizers: list[MemoryDistributedOptimizer | ReadTables],
        value_clip_grad: float | None,
        roundings: Mapping[nn.Parameter, TableRoundings],
    ) -> None:
        """Chain the optimizers.

        Args:
            optimizers: dense first, tables with gradients of rows last, of these the ones in files last.
            value_clip_grad: largest norm of the tables' gradients (0: any), which then do not count in the other norm;
                None: one norm for all.
            roundings: roundings of the gradients of tables on this rank that are in bf16.
        """
        super().__init__(optimizers)
        self._value_clip_grad, self._roundings = value_clip_grad, roundings

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: a step begins."""
        super().zero_grad(set_to_none)
        for of_table in self._roundings.values():
            of_table.begin_step()

    def announce_step(self, *, updates_tables: bool) -> None:
        """Say whether the next step updates tables whose gradients are rows (`optimizer.tables_every`)."""
        for optimizer in self.chained_optimizers:
            if isinstance(optimizer, ReadTables):
                optimizer.are_due = updates_tables

    @property
    def num_windows(self) -> int:
        """Windows in which tables pass through the host in an update; 0 if they are stepped on the device."""
        return sum(rule.num_windows for rule in self.rules)

    @property
    def rules(self) -> Sequence[UpdateRule]:
        """The rules of all optimizers."""
        return [rule for optimizer in self.chained_optimizers for rule in optimizer.rules]

    def sharded_state_dict(self, model_sharded_state_dict: Any) -> dict[str, Any]:
        """The entries of all optimizers; their names are the parameters' and do not collide."""
        return {
            key: entry
            for optimizer in self.chained_optimizers
            for key, entry in optimizer.sharded_state_dict(model_sharded_state_dict).items()
        }

    @torch.no_grad()
    def gradient_norms(self) -> GradientNorms:
        """Gradient norms over all ranks, each parameter counted once. Collective.

        Squares are summed in fp64: an fp32 sum over a shard of a million elements is off by 1e-5, by another amount on
        every layout.
        """
        # An optimizer of its own has the tables in another order than one of all parameters.
        gradients: dict[bool, list[Tensor]] = {False: [], True: []}
        for optimizer in self.chained_optimizers:
            for group, gradient in optimizer.gradients(counted_once=True):
                gradients[self._is_clipped_apart(group)].append(gradient)
        sums = torch.stack([sum_in_any_order(sums_of_squares(of_norm)) for of_norm in gradients.values()])
        torch.distributed.all_reduce(sums)
        # Host sync: the norms decide whether there is an update at all.
        main, tables = sums.sqrt().tolist()
        return GradientNorms(main, None if self._value_clip_grad is None else tables)

    @torch.no_grad()
    def clip(self, norms: GradientNorms) -> None:
        """Scale the gradients down to the largest norms that the run allows."""
        gradients: dict[bool, list[Tensor]] = {False: [], True: []}
        for optimizer in self.chained_optimizers:
            for group, gradient in optimizer.gradients(counted_once=False):
                gradients[self._is_clipped_apart(group)].append(gradient)
        scale_to(gradients[False], norms.main, self.config.clip_grad)
        if norms.tables is not None:
            assert self._value_clip_grad is not None
            scale_to(gradients[True], norms.tables, self._value_clip_grad)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update all weights, then gather them from the ranks that own them: once, and not once per optimizer."""
        for optimizer in self.chained_optimizers:
            optimizer.step_with_ready_grads()
        for of_table in self._roundings.values():
            of_table.num_updates += 1
        start_gathering(self.model_chunks)
        return True

    def set_num_updates(self, updates_of: UpdatesOf) -> None:
        """See `MemoryDistributedOptimizer.set_num_updates`."""
        for optimizer in self.chained_optimizers:
            optimizer.set_num_updates(updates_of)
        for table, of_table in self._roundings.items():
            of_table.num_updates = updates_of(table)

    def set_weights_from_main(self) -> None:
        """Round all main weights to this rank's shares of the model's; readers of weights gather them first."""
        for optimizer in self.chained_optimizers:
            optimizer.set_weights_from_main()

    def describe(self) -> Iterator[str]:
        """Places and implementations of updates that a run tells of at its start, in words."""
        for rule in self.rules:
            if (text := rule.describe()) is not None:
                yield text

    def _is_clipped_apart(self, group: GroupName) -> bool:
        return self._value_clip_grad is not None and group in TABLE_GROUPS
