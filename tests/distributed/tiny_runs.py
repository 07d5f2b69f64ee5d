"""Tiny models trained on random tokens inside of ranks that `run_ranks` started, on any layout."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megamem.attention.documents import DOCUMENT_BOUNDS, document_bounds, document_positions
from megamem.config.model import ModelConfig
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.model import MemoryGPTModel
from megamem.parameters.shards import walk_shards
from megamem.placement.sharing import SharingConfig
from parallel.groups import ParallelGroups, close_groups, initialise_groups
from parallel.machine.cpu import cuda_on_cpu
from parallel.sharded_bank import announce_tokens
from pretrain.checkpoint.folder import read_state, step_folder
from pretrain.checkpoint.run_entries import entries_to_save, restore_run
from pretrain.checkpoint.saver import Saver
from pretrain.checkpoint.store.tensors import Region, TensorReader
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import ParallelConfig, RunConfig, TrainConfig
from pretrain.engine.build import build_chunks, build_unset_chunks, wrap_chunks
from pretrain.engine.build_optimizer import build_optimizer
from pretrain.engine.megatron import parallel_sizes
from pretrain.engine.optimizer import MemoryOptimizer
from pretrain.engine.step import Batch
from pretrain.state import RunState
from pretrain.train.loop import take_step
from pretrain.train.run import Run

VOCAB_SIZE = 61

# AdamW divides by sqrt(v) + epsilon. Where a gradient is a rounding of 0, the usual 1e-8 makes an update of full size
# out of it, and the second step's loss depends on it: an ulp more or less in every weight moves losses and norms by
# 4e-6 of themselves in one of ten seeds. With an epsilon above the median element of the clipped gradients (5e-4), an
# update still tells how large its gradient was, equal parameters mean equal gradients, and that ulp moves losses and
# norms by at most 2e-7 in all of the ten.
EPSILON = 1e-3

MEMORY = UltraMemV2Config(num_keys=12, key_dim=8, value_dim=16, pre_value_dim=8, top_k=4)

SHARED = RunConfig(
    model=ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        vocab_size_multiple=16,
        memory=replace(MEMORY, sharing=SharingConfig("block", 2)),
    ),
    train=TrainConfig(num_steps=20, global_batch_size=8, micro_batch_size=4, sequence_length=16),
    optimizer=OptimizerConfig(
        lr=2e-3,
        epsilon=EPSILON,
        warmup_steps=4,
        clip_grad=0.5,
        value_lr_multiplier=3.0,
        value_lr_end_multiplier=1.0,
    ),
)
"""Pairs of layers share a bank; tied embeddings, grouped queries."""

PRIVATE = replace(
    SHARED,
    model=replace(
        SHARED.model, num_query_groups=None, tied_embeddings=False, memory=replace(MEMORY, num_heads=2, pre_value_dim=0)
    ),
)
"""A table per layer, so that one layer may be a chunk; untied embeddings, two heads, no pre-values."""


def chunk_of(
    config: RunConfig,
    groups: ParallelGroups,
    weights: TensorReader,
    vocab_size: int,
    dtype: torch.dtype | None = None,
) -> MemoryGPTModel:
    """A rank's part of a model without stages, with a checkpoint's weights, of any format."""
    (chunk,) = build_unset_chunks(config, groups, vocab_size=vocab_size, dtype=dtype)
    for _, shard in walk_shards(chunk.sharded_state_dict()):
        region = Region(shard.key, tuple(shard.global_offset), tuple(shard.local_shape))
        shard.data.detach().copy_(weights.read(region))
    chunk.weights_are_set = True
    return chunk


@dataclass
class TinyRun:
    """A built run without data sets or a folder, the batches that it trains on, and how to train it.

    Attributes:
        run: the product's; its state moves on.
        bare: this rank's chunks without DDP.
        batches: a stream of microbatches per chunk.
    """

    run: Run
    bare: list[MemoryGPTModel]
    batches: list[Iterator[Batch]]

    def train(self, num_steps: int) -> list[tuple[float, float]]:
        """Take steps as the training loop does, and complete the weights; the loss and the gradient norm of each."""
        rows = [take_step(self.run, self.batches)[1] for _ in range(num_steps)]
        self.run.complete_weights()
        return [(row["loss"], row["grad_norm"]) for row in rows]

    def update(
        self, planted: Callable[[str, tuple[int, ...]], Tensor | None], *, lr: float, weight_decay: float
    ) -> None:
        """One update by planted gradients, and complete the weights.

        Args:
            planted: gives the gradient of a whole parameter by its name and shape; None: it is zero.
            lr, weight_decay: settings of all groups.
        """
        for chunk, bare in zip(self.chunks, self.bare, strict=True):
            chunk.zero_grad_buffer()
            for parameter, leaf in walk_shards(bare.sharded_state_dict()):
                if isinstance(parameter, torch.nn.Parameter):
                    part = tuple(slice(a, a + n) for a, n in zip(leaf.global_offset, leaf.local_shape, strict=True))
                    whole = planted(leaf.key, tuple(leaf.global_shape))
                    if whole is not None:
                        first = leaf.data.storage_offset() - parameter.storage_offset()
                        parameter.main_grad.view(-1)[first : first + leaf.data.numel()] = whole[part].flatten()
        self.optimizer.zero_grad()
        self.optimizer.prepare_grads()
        for group in self.optimizer.param_groups:
            group.update(lr=lr, weight_decay=weight_decay)
        self.optimizer.step_with_ready_grads()
        # As the next forward pass does.
        self.run.complete_weights()

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def groups(self) -> ParallelGroups:
        return self.run.groups

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        return self.run.chunks

    @property
    def optimizer(self) -> MemoryOptimizer:
        return self.run.optimizer

    @property
    def num_skipped(self) -> int:
        return self.run.state.num_skipped

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of where the run stands."""
        return save_run(self.config, self.run.state, self.chunks, self.optimizer, folder)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint: state and place in the data. The run has not trained yet."""
        saved = read_state(path)
        settings = self.config.optimizer
        self.run.state = restore_run(
            saved, self.chunks, self.optimizer, trained=settings.trained, tables_every=settings.tables_every
        )
        per_rank = self.config.train.micro_batch_size * self.groups.data_size
        for batches in self.batches:
            for _ in range(self.run.state.consumed_samples // per_rank):
                next(batches)


def on(
    config: RunConfig,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    context: int = 1,
    memory: int = 1,
    memory_rows: int = 1,
    micro_batch_size: int = 4,
    recompute: Literal["none", "full", "selective"] = "none",
    recompute_streams: int | None = None,
) -> RunConfig:
    """The run on another layout."""
    return replace(
        config,
        parallel=ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual_pipeline,
            context=context,
            memory=memory,
            memory_rows=memory_rows,
        ),
        train=replace(
            config.train,
            micro_batch_size=micro_batch_size,
            recompute=recompute,
            recompute_streams=recompute_streams,
        ),
    )


def save_run(
    config: RunConfig,
    state: RunState,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MemoryOptimizer,
    folder: Path,
) -> Path:
    """Write a checkpoint, to the end, and give its folder, inside of `folder`. Collective."""
    saver = Saver()
    saver.start(config, state, entries_to_save(config, chunks, optimizer), folder)
    saver.finish()
    return step_folder(folder, state.step)


@contextlib.contextmanager
def tiny_run(config: RunConfig, build_model: Callable[..., list[MemoryGPTModel]] = build_chunks) -> Iterator[TinyRun]:
    """Build a run in the world that is already joined; Megatron's groups are gone afterwards, so that another layout
    may follow.

    Args:
        config: the run.
        build_model: makes the chunks.
    """
    with joined(config) as groups:
        yield build(config, groups, build_model)


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[ParallelGroups]:
    """Megatron's groups for a layout, of which several runs may be built."""
    with warnings.catch_warnings(), cuda_on_cpu():
        warnings.simplefilter("ignore")
        groups = initialise_groups(
            parallel_sizes(config), device=torch.device("cpu"), timeout_minutes=5, seed=config.seed
        )
        try:
            yield groups
        except BaseException:
            # The other ranks may be anywhere: nothing is closed together.
            parallel_state.destroy_model_parallel()
            raise
        close_groups()


def build(
    config: RunConfig, groups: ParallelGroups, build_model: Callable[..., list[MemoryGPTModel]] = build_chunks
) -> TinyRun:
    """Build a run on a layout whose groups are there."""
    bare = build_model(config, groups, vocab_size=VOCAB_SIZE)
    chunks = wrap_chunks(bare, config, groups)
    optimizer = build_optimizer(config, chunks, groups)
    # Parts that read data sets or folders are not asked for.
    nothing: Any = None
    run = Run(
        config=config,
        folder=nothing,
        groups=groups,
        tokenizer=nothing,
        train_data=nothing,
        held_out=nothing,
        chunks=chunks,
        optimizer=optimizer,
        state=RunState().training(config.optimizer.trained).updating_tables(config.optimizer.tables_every),
        flops_per_token=1.0,
    )
    return TinyRun(run, bare, [random_batches(config, groups) for _ in chunks])


def answers_without_a_token(configs: Sequence[RunConfig]) -> int:
    """Number of models that answer on the first of two ranks, where the second has no token, as one rank of a group
    generates."""
    with joined(on(configs[0], memory=2)) as groups:
        for config in configs:
            (model,) = build(on(config, memory=2), groups).bare
            announce_tokens(model.banks.values(), (5, 0))
            with torch.no_grad():
                if groups.rank == 0:
                    ids = torch.arange(5).unsqueeze(0)
                    assert model(ids, ids, None).shape[:2] == (1, 5)
                else:
                    model.serve_memory()
    return len(configs)


def second_steps(
    config: RunConfig, folder: Path, saved_on: Mapping[str, Any], resumed_on: Sequence[Mapping[str, Any]]
) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of a run's second step on each of some layouts, all of them from the checkpoint that the first
    step on another one left."""
    with tiny_run(on(config, **saved_on)) as run:
        run.train(1)
        run.save(folder)
    found = []
    for sizes in resumed_on:
        with tiny_run(on(config, **sizes)) as run:
            run.resume(folder / "step_00000001")
            found.append(run.train(1))
    return found


def random_batches(config: RunConfig, groups: ParallelGroups) -> Iterator[Batch]:
    """Microbatches of this data-parallel rank; over all of them, every step sees the same samples on any layout.

    A quarter of the targets does not count, another share in every sample: a mean over ranks of means would show.
    """
    train = config.train
    generator = torch.Generator().manual_seed(7)
    per_rank = train.global_batch_size // groups.data_size
    while True:
        tokens = torch.randint(0, VOCAB_SIZE, (train.global_batch_size, train.sequence_length + 1), generator=generator)
        counted = torch.rand(train.global_batch_size, train.sequence_length, generator=generator)
        counted = (counted < torch.linspace(0.5, 1, train.global_batch_size).unsqueeze(1)).float()
        mine = slice(groups.data_rank * per_rank, (groups.data_rank + 1) * per_rank)
        for sample, mask in zip(
            tokens[mine].split(train.micro_batch_size), counted[mine].split(train.micro_batch_size), strict=True
        ):
            tokens = sample[:, :-1].contiguous()
            # One id in eight ends a document, or none does.
            ends = tokens % 8 == 0 if config.data.documents == "separate" else torch.zeros_like(tokens)
            positions = document_positions(ends.long(), eod=1)
            yield {
                "tokens": tokens,
                "labels": sample[:, 1:].contiguous(),
                "loss_mask": mask,
                "position_ids": positions,
                DOCUMENT_BOUNDS: document_bounds(positions),
            }


def global_parameter_name(name: str, layers: range) -> str:
    """The layout-free name of a chunk's parameter: `decoder.layers.<i>` counts from the model's first layer."""
    parts = name.split(".")
    for index in range(len(parts) - 2):
        if parts[index : index + 2] == ["decoder", "layers"]:
            parts[index + 2] = str(int(parts[index + 2]) + layers.start)
            break
    return ".".join(parts)
