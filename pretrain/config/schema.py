"""The configuration of a run. The docstring under a field is its help text.

See `megamem.config.base` for limits and conditional fields, and `megamem.config.identity.Role` for what a resume may change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Le, Lt
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from kernels.implementations import Implementation
from megamem.config.base import Advice, Config, EffectiveWhen
from megamem.config.identity import Role
from megamem.config.model import ModelConfig
from pretrain.config.fields import ApexPart, FolderPath, Shuffle
from pretrain.config.health import HealthConfig
from pretrain.config.optimizer import OptimizerConfig

Seed = Annotated[
    NonNegativeInt, Lt(2**31), Advice("seeds of ranks and layers are derived by adding to it, and have 31 bits")
]
ShareOfGpu = Annotated[PositiveFloat, Le(1), Advice("it is a share of a GPU")]


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Layout of the model over ranks. Data parallelism takes the ranks that tensor x pipeline x context leave."""

    tensor: PositiveInt = 1
    """Tensor-parallel size. Above 1, activations between blocks are split along the sequence (sequence parallelism)."""
    pipeline: PositiveInt = 1
    """Pipeline stages."""
    virtual_pipeline: Annotated[
        PositiveInt, EffectiveWhen(lambda c: c.pipeline > 1, "parallel.pipeline is above 1")
    ] = 1
    """Model chunks per pipeline stage; above 1 selects the interleaved schedule."""
    pipeline_layout: Annotated[str | None, EffectiveWhen(lambda c: c.pipeline > 1, "parallel.pipeline is above 1")] = (
        None
    )
    """Contents of each of the pipeline x virtual_pipeline chunks, in the order of the depth: E the embedding, t a
    block, L the loss, | between chunks, x*3 or (..)*3 to repeat, as in Et|(ttt|)*2tL; null: equal numbers of
    blocks."""
    context: PositiveInt = 1
    """Context-parallel size: ranks over which every sequence is cut, whose length is a multiple of 2 x context and
    of tensor x context. See docs/context-parallel.md."""
    context_attention: Annotated[
        Literal["auto", "gather", "heads", "ring"],
        EffectiveWhen(lambda c: c.context > 1, "parallel.context is above 1"),
    ] = "auto"
    """Way of attending to other ranks' tokens. gather: keys and values of the whole sequence on every rank; heads:
    all tokens of some heads, by all-to-all; ring: keys and values of one rank at a time; auto: heads where they can
    be shared out and send no more bytes than ring, else ring."""
    memory: PositiveInt = 1
    """G: ranks over which the columns of the memory tables, and the experts of a mixture, are split. Any divisor of
    tensor x context x data, across them."""
    memory_rows: Annotated[PositiveInt, EffectiveWhen(lambda c: c.memory > 1, "parallel.memory is above 1")] = 1
    """R: parts of the rows of the memory tables, each of which memory / memory_rows ranks split by columns; 1: columns
    alone. Rows stay wider, and a GPU reads them faster, but the exchange sends more: for groups beyond a node."""
    overlap_memory: Annotated[bool, EffectiveWhen(lambda c: c.memory > 1, "parallel.memory is above 1")] = True
    """On GPUs, run the memory of split tables on a CUDA stream of its own beside the feed-forward; false: one after
    the other."""
    gradient_sm_share: Annotated[
        ShareOfGpu,
        EffectiveWhen(
            lambda c: c.memory > 1 and c.overlap_memory,
            "parallel.memory is above 1 and parallel.overlap_memory is true",
        ),
    ] = 1.0
    """Share of a GPU's multiprocessors, the others of which go on with products of matrices, on which the gradients of
    split tables are added up beside the rest of backward; 1: all, whichever kernel comes first. Below 1 needs CUDA
    12.8."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over the replicas in parts, each as soon as the last microbatch's backward pass has it; false:
    all of them after that pass."""
    overlap_param_gather: bool = True
    """Gather updated weights from the replicas that step them in parts, each until the next forward pass needs it;
    false: all of them before it starts."""
    timeout_minutes: PositiveFloat = 10.0
    """Minutes that a collective may wait before the run ends with an error."""

    @property
    def memory_columns(self) -> int:
        """G / R: parts of the columns of the memory tables."""
        return self.memory // self.memory_rows


@dataclass(frozen=True)
class BatchRampConfig(Config):
    """Smaller batches first. After t of `over_tokens` tokens a step has start_size + k x increment sequences, where k
    is t / over_tokens x (number of increments), rounded down; after all of them, global_batch_size."""

    start_size: PositiveInt = 1
    """Sequences of the first step, over all ranks."""
    increment: PositiveInt = 1
    """Sequences by which a step grows at a time; they lead from start_size to train.global_batch_size exactly."""
    over_tokens: PositiveInt = 1_000_000
    """Tokens, from the first step of the run or stage, after which train.global_batch_size is reached."""


@dataclass(frozen=True)
class TrainConfig(Config):
    """Length, batch and precision of a run."""

    num_steps: PositiveInt = 100
    """Optimizer steps in all. In a run of stages up to the end of this one; a file says lengths in `stages`."""
    global_batch_size: PositiveInt = 32
    """Sequences per optimizer step, over all ranks."""
    batch_ramp: BatchRampConfig | None = None
    """Smaller steps at the start of the run, or of the stage; null: all of global_batch_size."""
    micro_batch_size: PositiveInt = 4
    """Sequences per forward pass and data-parallel rank; the rest of the global batch is accumulated."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: bf16 weights and activations with fp32 main weights, gradients and optimizer state. CPUs without
    instructions for matrices of bf16 take products in fp32 (`megamem doctor`)."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation: every block (full), or the attention core only (selective)."""
    recompute_streams: Annotated[
        PositiveInt | None, EffectiveWhen(lambda c: c.recompute != "full", "train.recompute is none or selective")
    ] = None
    """Blocks whose residual streams are kept once, before the first of them; backward mixes those between again, of outputs
    of attention and feed-forwards that it keeps anyway. null: streams are kept at every site."""
    loss_chunk_tokens: PositiveInt | None = 8192
    """Tokens whose logits exist at a time, of a microbatch on its tensor-parallel ranks. A microbatch with more
    computes its loss in chunks of so many, and each chunk's logits once more in backward; null: always all at once."""
    deterministic: bool = False
    """On GPUs, the same bits whenever the same run is repeated or resumed: attention and embeddings sum their gradients
    in a fixed order, which takes longer. On CPUs that is always so."""
    apex: tuple[ApexPart, ...] = ()
    """Parts of a step that NVIDIA's Apex computes, where it is installed with their extensions. norms: those of the backbone;
    weight_gradients: gradients of the backbone's linears, whose products are added to the fp32 sums at once; adamw: the
    update of all groups that AdamW has on the device. See docs/megatron.md."""
    max_skipped_steps: PositiveInt = 20
    """Consecutive steps without an update (for a non-finite loss or gradient, or a spike) after which the run stops."""
    cuda_graph: Literal["none", "microbatch"] = "none"
    """microbatch: on GPUs, the passes of a microbatch are captured once as a CUDA graph and replayed, for which the host
    takes microseconds and not tens of milliseconds. For models of one rank each, but for tables that are split
    (parallel.memory, with overlap_memory: false), with any number of replicas. See docs/megatron.md."""
    kernels: Implementation = "auto"
    """Implementation of the kernels. auto: triton on GPUs with Triton, cpu (C++) on CPUs with a compiler,
    else torch (its operations); naive: the references."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all ranks; after `batch_ramp`, if there is one."""
        return self.global_batch_size * self.sequence_length

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True)
class DatasetEntry(Config):
    """One prepared data set of a blend."""

    path: FolderPath
    """Folder written by `megamem data prepare`."""
    weight: Annotated[
        PositiveFloat,
        Advice("remove the entry to leave it out"),
        EffectiveWhen(lambda c: c.epochs is None, "the entry's epochs is null"),
    ] = 1.0
    """Share of the samples, relative to the other entries."""
    name: str | None = None
    """Its domain in evaluations; data sets of one name are one domain. null: the last part of its path, or all of it
    where two paths end alike."""
    epochs: Annotated[PositiveFloat | None, Advice("remove the entry to leave it out")] = None
    """Passes over it in the longest run that the blend allows: with its size this is its share, and a run that is longer
    is refused. For all entries or for none; null: its share is its weight, and it is read as often as that takes."""


@dataclass(frozen=True)
class DataConfig(Config):
    """Source of the training tokens."""

    datasets: tuple[DatasetEntry, ...] = ()
    """Prepared data sets, blended by weight; all of one tokenizer."""
    seed: Seed | None = None
    """Seed of the document and sample order; null: the run's seed."""
    documents: Literal["joined", "separate"] = "joined"
    """joined: attention and positions run across the documents of a sequence; separate: positions start anew at every
    document, and attention does not cross documents, in training and in evaluation."""
    shuffle: Shuffle = "documents"
    """Unit of shuffling. documents: the documents of every epoch, then the samples that they are cut into; the order is
    an index, made before the first step and kept on disk. samples: documents stay as they were prepared, and the
    samples that every pass is cut into are shuffled; the order is computed, and costs nothing whatever the size of
    the data."""
    num_workers: NonNegativeInt = 0
    """Processes per rank that read ahead; 0: read in the training process."""
    allow_change: bool = False
    """Go on with a run though its data sets are not those that it was trained on, and name those that differ; false:
    refuse that, by the hashes in the checkpoint. A folder may always be moved, and a stage that begins states its own
    data."""


@dataclass(frozen=True)
class EvaluationEntry(Config):
    """One prepared data set to evaluate on."""

    path: FolderPath
    """Folder written by `megamem data prepare`, with the tokenizer of the training data. Its held-out documents are
    read, or all of them if it was prepared without any."""
    name: str | None = None
    """Its domain; data sets of one name are one domain. null: the last part of its path, or all of it where two paths
    end alike."""


@dataclass(frozen=True)
class EvaluationConfig(Config):
    """Loss on held-out documents during training."""

    datasets: tuple[EvaluationEntry, ...] = ()
    """Prepared data sets to evaluate on; none: the held-out documents of data.datasets."""
    every_steps: NonNegativeInt = 0
    """Evaluate after every so many steps; 0: at the end only."""
    max_sequences: PositiveInt | None = None
    """Held-out sequences per evaluation, the first ones in the order of the data sets; null: all of them."""


@dataclass(frozen=True)
class CheckpointConfig(Config):
    """Contents of checkpoints, and which of them are kept."""

    every_steps: NonNegativeInt = 0
    """Save after every so many steps; 0: at the end only."""
    keep_last: NonNegativeInt = 2
    """Newest checkpoints to keep; 0: all."""
    keep_every_steps: NonNegativeInt = 0
    """Checkpoints of steps divisible by this are never removed; 0: no such rule."""
    weights_copy: bool = False
    """Also write the weights in train.precision, for readers of them alone; false: only the fp32 main weights, which
    determine them to the bit."""
    writer_threads: PositiveInt = 2
    """Threads per rank that write and hash files of a checkpoint, each a file at a time."""
    asynchronous: bool = False
    """Go on training while a checkpoint is written from a copy in host memory, page-locked with GPUs: 12 bytes per
    parameter over all ranks, kept from the first save to the end of the run."""
    check_hashes: bool = True
    """Before a checkpoint is restored, read its files once, shared out over the ranks, and hold them against the SHA-256
    that they were written with; false: trust their sizes."""


@dataclass(frozen=True)
class LoggingConfig(Config):
    """Sinks of metrics besides `metrics.jsonl`, which is always written."""

    every_steps: PositiveInt = 1
    """Write a metrics row every so many steps."""
    memory_every_steps: NonNegativeInt = 10
    """Observe how the memory is used (coverage, evenness, scores, output, singular values) on one step of every so
    many, and write its row; 0: never. Takes 4 bytes per layer and row of its window."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run folder."""
    wandb_mode: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases; offline writes files that `wandb sync` uploads."""
    wandb_project: Annotated[
        str, EffectiveWhen(lambda c: c.wandb_mode != "disabled", "logging.wandb_mode is offline or online")
    ] = "megamem"
    """Weights & Biases project."""


@dataclass(frozen=True)
class StageConfig(Config):
    """Place of a stage in its run. `megamem train` derives it from `stages`; files need not say it."""

    name: str
    """Name of the stage."""
    optimizer_state: Literal["keep", "reset"] = "keep"
    """At its first step: keep AdamW's moments, or start them at zero with their bias correction."""
    steps_before: NonNegativeInt = 0
    """Optimizer steps of the run before it."""
    samples_before: NonNegativeInt = 0
    """Sequences that these steps saw."""
    tokens_before: NonNegativeInt = 0
    """Tokens that they saw."""
    first_sample: NonNegativeInt = 0
    """Number of its first sequence in the order of its data: above 0 where a stage before it read the same data."""
    run_steps: PositiveInt = 1
    """Optimizer steps of the run up to the end of its last stage."""
    run_tokens: PositiveInt = 1
    """Tokens of these steps."""


@dataclass(frozen=True)
class RunConfig(Config):
    """Everything that defines a run."""

    name: Annotated[str, Role.RUNNING] = "run"
    """Names the run folder (runs/<name>) unless --run-dir is given."""
    seed: Annotated[Seed, Role.IDENTITY] = 1
    """Seed of the initial weights and, unless data.seed is set, of the data order."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    parallel: Annotated[ParallelConfig, Role.RUNNING] = field(default_factory=ParallelConfig)
    """The layout."""
    train: Annotated[TrainConfig, Role.RUNNING] = field(default_factory=TrainConfig)
    """Length, batch, precision."""
    optimizer: Annotated[OptimizerConfig, Role.RUNNING] = field(default_factory=OptimizerConfig)
    """Optimizer groups and schedules."""
    data: Annotated[DataConfig, Role.RUNNING] = field(default_factory=DataConfig)
    """Data sets."""
    evaluation: Annotated[EvaluationConfig, Role.RUNNING] = field(default_factory=EvaluationConfig)
    """Evaluation during training."""
    checkpoint: Annotated[CheckpointConfig, Role.RUNNING] = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logging: Annotated[LoggingConfig, Role.RUNNING] = field(default_factory=LoggingConfig)
    """Metrics sinks."""
    health: Annotated[HealthConfig, Role.RUNNING] = field(default_factory=HealthConfig)
    """Spikes, hangs, slow ranks, replicas that differ."""
    stage: Annotated[StageConfig | None, Role.RUNNING] = None
    """The stage of a run of several that this is; null: the whole run. Not to be written by hand: see `stages`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Runs of before may have other names, and are still read; those that start are held to plain ones.
        leaves = self.name.startswith("/") or ".." in self.name.split("/") or not self.name.strip(".")
        if leaves or not self.name.isprintable():
            raise ValueError(f"name is {self.name!r}: it names a folder, so use letters, digits and . _ - + =")

    @property
    def run_steps(self) -> int:
        """Optimizer steps of the run, all its stages included."""
        return self.train.num_steps if self.stage is None else self.stage.run_steps

    @property
    def data_seed(self) -> int:
        """Seed of the data order."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def evaluated(self) -> tuple[DatasetEntry | EvaluationEntry, ...]:
        """The data sets whose documents are held out for evaluation."""
        return self.evaluation.datasets or self.data.datasets

    @property
    def read_data(self) -> tuple[DatasetEntry | EvaluationEntry, ...]:
        """Every data set that a training run reads, those to train on first; none without one of those."""
        return (*self.data.datasets, *self.evaluation.datasets) if self.data.datasets else ()
