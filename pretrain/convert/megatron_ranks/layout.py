"""Which ranks' files such a checkpoint has, what they are called, and which blocks and experts are in each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megamem.config import ModelConfig
from parallel.pipeline_layout import ModelChunk, chunks_of_stage, model_chunks
from pretrain.errors import ConfigError

FILE_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))??(?:_(\d{3,}))?")


@dataclass(frozen=True)
class RankFile:
    """One rank's file.

    Attributes:
        tensor: its place among the ranks that split matrices.
        stage: its pipeline stage.
        expert: its place among the ranks that divide the experts.
    """

    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True)
class RankLayout:
    """How a model is divided over files, and which of Megatron's modules they are for.

    Attributes:
        tensor: ranks that split matrices; experts are split over the same ranks, as Megatron-LM does unless told.
        pipeline: stages.
        virtual_pipeline: chunks per stage.
        expert: ranks that divide the experts.
        implementation: Megatron-LM's `--transformer-impl`. Transformer Engine keeps a norm with the matrix behind it.
        grouped_experts: whether a block's experts are one module (`--moe-grouped-gemm`).
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    implementation: Literal["local", "transformer_engine"] = "transformer_engine"
    grouped_experts: bool = False

    def check(self, model: ModelConfig, vocabulary: int) -> None:
        """Refuse what cannot be divided so.

        Args:
            model: its config.
            vocabulary: rows of the embedding, padding included.

        Raises:
            ConfigError: it names the size that does not fit.
        """
        if model.memory is not None:
            raise ConfigError(
                f"model.memory.kind is {model.memory.kind}, and Megatron-LM has no memory layers: use the native format, "
                "or huggingface"
            )
        if model.latent_attention is not None:
            raise ConfigError(
                "model.latent_attention is set, and this format has projections of keys and values: use the native format"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(f"virtual pipeline {self.virtual_pipeline} needs a pipeline of 2 stages or more")
        depth = self.pipeline * self.virtual_pipeline
        width = model.ffn_hidden_size if model.moe is None else model.moe.expert_ffn_hidden_size
        experts = 1 if model.moe is None else model.moe.num_experts
        for value, parts, name, of in (
            (model.num_layers, depth, "pipeline x virtual pipeline", "model.num_layers"),
            (model.query_groups, self.tensor, "tensor", "the number of query groups"),
            (width, self.tensor, "tensor", "the width of the feed-forward"),
            (vocabulary, self.tensor, "tensor", "the padded vocabulary"),
            (experts, self.expert, "expert", "the number of experts"),
        ):
            if value % parts:
                raise ConfigError(f"{name} {parts} does not divide {of}, {value}: choose a divisor")
        if self.grouped_experts and self.implementation == "local":
            raise ConfigError("grouped experts are Transformer Engine's: use --transformer-impl transformer_engine")

    @property
    def files(self) -> Iterator[RankFile]:
        """All files, the first copy of everything before the others."""
        for expert in range(self.expert):
            for stage in range(self.pipeline):
                for tensor in range(self.tensor):
                    yield RankFile(tensor, stage, expert)

    def folder(self, file: RankFile) -> str:
        """The name of a rank's folder."""
        stage = f"_{file.stage:03d}" if self.pipeline > 1 else ""
        expert = f"_{file.expert:03d}" if self.expert > 1 else ""
        return f"mp_rank_{file.tensor:02d}{stage}{expert}"

    def chunks(self, model: ModelConfig, file: RankFile) -> dict[str, ModelChunk]:
        """What a file holds, by the key of each model chunk in it."""
        every = model_chunks(
            model.num_layers, pipeline=self.pipeline, virtual_pipeline=self.virtual_pipeline, layout=None
        )
        of_stage = chunks_of_stage(every, pipeline=self.pipeline, pipeline_rank=file.stage)
        if self.virtual_pipeline == 1:
            return {"model": of_stage[0]}
        return {f"model{index}": chunk for index, chunk in enumerate(of_stage)}


def is_rank_folder(name: str) -> bool:
    """Whether a folder is one of a rank."""
    return _FOLDER.fullmatch(name) is not None
