"""Megatron-LM's checkpoints of one file per rank: dense models and mixtures, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megamem.config import ModelConfig
from pretrain.checkpoint.store.files import WrittenFile
from pretrain.checkpoint.store.selected import Joined
from pretrain.checkpoint.store.tensors import TensorReader
from pretrain.config.schema import RunConfig
from pretrain.convert.format import OpenedCheckpoint, Target
from pretrain.convert.megatron_ranks.arguments import run_of
from pretrain.convert.megatron_ranks.folder import TRACKER, RanksPlan, differing_copies, open_ranks
from pretrain.convert.megatron_ranks.layout import RankLayout, is_rank_folder
from pretrain.convert.names import MEGATRON_RANKS
from pretrain.errors import ConfigError


class MegatronRanksFormat:
    """See `CheckpointFormat`."""

    name = MEGATRON_RANKS

    def holds_optimizer(self, model: ModelConfig) -> bool:
        return model.moe is None

    def is_at(self, path: Path) -> bool:
        return path.is_dir() and (
            (path / TRACKER).is_file() or any(is_rank_folder(each.name) for each in path.iterdir())
        )

    def open(self, path: Path, step: int | None, config: RunConfig | None) -> OpenedCheckpoint:
        found = open_ranks(path if step is None else path / f"iter_{step:07d}")
        run, state = run_of(found.arguments, found.iteration)
        layout = found.layout
        sizes = (
            f"tensor {layout.tensor}, pipeline {layout.pipeline} x {layout.virtual_pipeline}, expert {layout.expert}"
        )
        return OpenedCheckpoint(
            path=found.path,
            format_name=self.name,
            reader=found.as_ours(),
            config=run,
            state=state,
            differing_copies=partial(differing_copies, found),
            notes={"iteration": f"{found.iteration:,}", "layout": sizes},
        )

    def convert(self, source: OpenedCheckpoint, target: Target) -> MegatronRanksConversion:
        return MegatronRanksConversion(source, target)


class MegatronRanksConversion:
    """See `Conversion`."""

    def __init__(self, source: OpenedCheckpoint, target: Target) -> None:
        if target.with_optimizer and source.state.trained:
            raise ConfigError(
                f"{source.path} has been trained in parts (optimizer.trained_layers), and {MEGATRON_RANKS} counts the "
                "updates of all parameters alike: convert it with --weights-only"
            )
        sizes = target.layout
        layout = RankLayout(
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            virtual_pipeline=sizes.virtual_pipeline,
            expert=sizes.memory,
            implementation=target.transformer_impl,
            grouped_experts=target.grouped_experts,
        )
        names = [*source.weights, *(source.optimizer_state if target.with_optimizer else ())]
        ours = Joined(source.weights_in(target.dtype), source.reader, names)
        self._plan = RanksPlan(
            ours, config=source.config, state=source.state, layout=layout, with_optimizer=target.with_optimizer
        )
        self.reader, self.files = self._plan.reader, self._plan.files

    def finish(self, folder: Path, written: Sequence[WrittenFile]) -> None:
        self._plan.finish(folder)

    def reopen(self, folder: Path) -> TensorReader:
        return open_ranks(folder)
