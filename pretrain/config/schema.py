"""The configuration of a run. The docstring under a field is its help text.

See `megamem.config.base` for limits and conditional fields, and `megamem.config.identity.Role` for what a resume may change.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Le, Lt
from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from kernels.implementations import Implementation
from megamem.config.base import Advice, Config, EffectiveWhen
from megamem.config.identity import Role
from megamem.config.model import ModelConfig
from megamem.parameters.trained_part import Trained
from pretrain.config.health import HealthConfig

Seed = Annotated[
    NonNegativeInt, Lt(2**31), Advice("seeds of ranks and layers are derived by adding to it, and have 31 bits")
]
Beta = Annotated[NonNegativeFloat, Lt(1)]
FolderPath = Annotated[str, AfterValidator(lambda path: path and os.path.abspath(os.path.expanduser(path)))]
"""A folder, found from anywhere once the configuration is read: not resolved, as a link may lead elsewhere on nodes."""
FilePath = FolderPath
"""A file, found from anywhere likewise."""
Origin = Literal["stage", "run"]
ApexPart = Literal["norms", "weight_gradients", "adamw"]
Shuffle = Literal["documents", "samples"]
PLAIN_NAME = re.compile(r"[\w.+=-]+")
"""Names of runs and stages, which stand in paths, command lines and batch scripts."""
ShareOfGpu = Annotated[PositiveFloat, Le(1), Advice("it is a share of a GPU")]
ShareOfRows = Annotated[PositiveFloat, Le(1), Advice("it is a share of rows")]
ShareOfRate = Annotated[NonNegativeFloat, Le(1), Advice("it is a share of optimizer.lr")]


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


def _uses_muon(optimizer: OptimizerConfig) -> bool:
    return optimizer.matrices == "muon"


@dataclass(frozen=True)
class TrainedRowsConfig(Config):
    """Rows of the memory tables that are trained, and nothing else: those that the text reads more than other text does.
    Without `number` and `share`, all rows that a step reads. See docs/patches.md."""

    number: PositiveInt | None = None
    """Rows of each table that a step updates at most, those of the highest scores; null: share says it."""
    share: Annotated[
        ShareOfRows | None, EffectiveWhen(lambda c: c.number is None, "optimizer.trained_rows.number is null")
    ] = None
    """Share of the rows of each table that a step reads, which it updates, rounded up; null: number says it, or all."""
    score: Annotated[
        Literal["tf_idf", "kl", "reads"],
        EffectiveWhen(lambda c: c.chooses, "optimizer.trained_rows has a number or a share"),
    ] = "tf_idf"
    """Score of a row. tf_idf: its share of the reads times log((B + 1) / (b + 1)), for b of the B sequences of the background
    that read it (sparse memory finetuning); kl: its share p of the reads times log(p / q), for its share q of the
    background's reads, each counted once more; reads: its share of the reads."""
    background: Annotated[
        FilePath | None,
        EffectiveWhen(
            lambda c: c.chooses and c.score != "reads",
            "optimizer.trained_rows has a number or a share, and its score is tf_idf or kl",
        ),
    ] = None
    """File of reads of text that the model knows, which `megamem patch counts` writes."""
    text: Annotated[
        FilePath | None,
        EffectiveWhen(lambda c: c.chooses, "optimizer.trained_rows has a number or a share"),
    ] = None
    """File of reads of the text to learn, by which rows are chosen once for the whole run; null: each step chooses rows by its
    own reads."""

    @property
    def chooses(self) -> bool:
        """True if not all rows that a step reads are trained."""
        return self.number is not None or self.share is not None

    @property
    def chooses_by_step(self) -> bool:
        """True if each step chooses rows by its own reads."""
        return self.chooses and self.text is None


@dataclass(frozen=True)
class OptimizerConfig(Config):
    """AdamW, in groups: backbone with and without decay, retrieval, experts, values and pre-values; Muon for matrices, or
    an update by row for tables, where they are asked for."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    min_lr: Annotated[
        NonNegativeFloat, EffectiveWhen(lambda c: c.schedule != "constant", "optimizer.schedule is cosine or wsd")
    ] = 1e-4
    """Learning rate at the end of the schedule."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up: constant; cosine to min_lr over the run; or warm-up, stable, linear decay to min_lr (wsd)."""
    schedule_from: Origin = "stage"
    """Span of warm-up and schedule, from its first step to its last: the stage, or the run."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up, after which the learning rate is lr."""
    warmup_start: Annotated[
        ShareOfRate | None, EffectiveWhen(lambda c: c.warmup_steps > 0, "optimizer.warmup_steps is above 0")
    ] = None
    """Share of lr at the first step, from which warm-up reaches lr at the step that follows it (0.1 in UltraMemV2's
    public code); null: 1 / warmup_steps, and lr at the last step of the warm-up."""
    decay_steps: Annotated[
        NonNegativeInt, EffectiveWhen(lambda c: c.schedule == "wsd", "optimizer.schedule is wsd")
    ] = 0
    """Steps of the final linear decay of the wsd schedule."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the decayed groups (matrices and tables; never norms and gains)."""
    value_weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay of the memory tables; null: weight_decay."""
    beta1: Beta = 0.9
    """AdamW's first-moment decay."""
    beta2: Beta = 0.95
    """AdamW's second-moment decay."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""
    value_clip_grad: NonNegativeFloat | None = None
    """Largest gradient norm of the memory tables (values and pre-values together), which then do not count in the
    global norm; 0: no clipping; null: they count in it."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """Update of the hidden matrices: attention, feed-forwards, experts and memory layers' projections; never embeddings,
    output projections, norms, routers, keys, cores and tables. muon: orthogonalised momentum, which keeps one moment.
    See docs/muon.md."""
    muon_lr_multiplier: Annotated[PositiveFloat, EffectiveWhen(_uses_muon, "optimizer.matrices is muon")] = 1.0
    """Learning rate of hidden matrices over that of their group, at every step."""
    muon_weight_decay: Annotated[NonNegativeFloat | None, EffectiveWhen(_uses_muon, "optimizer.matrices is muon")] = (
        None
    )
    """Decoupled weight decay of hidden matrices; null: that of their group."""
    muon_scale: Annotated[
        Literal["match_rms_adamw", "original"],
        EffectiveWhen(_uses_muon, "optimizer.matrices is muon"),
    ] = "match_rms_adamw"
    """Size of an update of a matrix of m x n, over its learning rate. match_rms_adamw: 0.2 sqrt(max(m, n)), so that AdamW's
    rates and decays fit; original: sqrt(max(1, m / n)), with rates about 0.02."""
    muon_momentum: Annotated[Beta, EffectiveWhen(_uses_muon, "optimizer.matrices is muon")] = 0.95
    """Decay of the momentum."""
    muon_nesterov: Annotated[bool, EffectiveWhen(_uses_muon, "optimizer.matrices is muon")] = True
    """Nesterov's momentum: the average looks ahead by the gradient once more."""
    muon_ns_steps: Annotated[
        PositiveInt,
        Le(20),
        Advice("each is three products of matrices, and more of them change nothing"),
        EffectiveWhen(_uses_muon, "optimizer.matrices is muon"),
    ] = 5
    """Newton-Schulz iterations that orthogonalise the momentum."""
    tables: Literal["adamw", "row_wise"] = "adamw"
    """Update of the memory tables. adamw: two moments per element, and fp32 main weights beside bf16 ones; row_wise: a
    second moment per row and no first, and bf16 weights that are rounded stochastically. See docs/memory-parallel.md."""
    row_clock: Annotated[
        Literal["updates", "reads"], EffectiveWhen(lambda c: c.tables == "row_wise", "optimizer.tables is row_wise")
    ] = "updates"
    """Clock of a row's second moment and decay. updates: the run's, as AdamW's; a moment shrinks at every update and is
    corrected for its start, and the decay, times the learning rate, reaches every row. reads: the row's own, as in nanochat's
    record; a moment shrinks when the row is read and is not corrected, and the rows that were read decay by
    value_weight_decay, whatever the rate. It takes table_gradients: rows. See docs/memory-parallel.md."""
    row_rule: Annotated[
        Literal["adam", "sgd"], EffectiveWhen(lambda c: c.tables == "row_wise", "optimizer.tables is row_wise")
    ] = "adam"
    """Size of a row's update. adam: the learning rate times its gradient over the root of the row's second moment; sgd: the
    learning rate times its gradient, which leaves moments as they are."""
    row_beta2: Annotated[
        Beta | None,
        EffectiveWhen(
            lambda c: c.tables == "row_wise" and c.row_rule == "adam",
            "optimizer.tables is row_wise and optimizer.row_rule is adam",
        ),
    ] = None
    """Second-moment decay of rows; null: beta2."""
    table_gradients: Annotated[
        Literal["dense", "rows", "auto"],
        EffectiveWhen(lambda c: c.tables == "row_wise", "optimizer.tables is row_wise"),
    ] = "dense"
    """Gradients of the memory tables. dense: of every element of a table; rows: of the distinct rows that a step reads, so that
    neither memory nor time grow with the table; auto: rows where tables can have them and a step reads at most half as often
    as there are rows, so that they take less memory and less time, else dense; a run says which, and why. See
    docs/memory-parallel.md."""
    tables_every: Annotated[
        PositiveInt,
        EffectiveWhen(
            lambda c: c.tables == "row_wise" and c.table_gradients == "rows",
            "optimizer.tables is row_wise and table_gradients is rows",
        ),
    ] = 1
    """Updates of the run per update of its tables, as in nanochat's and modded-nanogpt's records: rows that several steps read
    are exchanged and updated once, by the mean of their gradients over all tokens of these steps. The steps between keep what
    their lookups left, and their gradient norm is that of the other weights. See docs/memory-parallel.md."""
    table_gradient_dtype: Annotated[
        Literal["fp32", "bf16"],
        EffectiveWhen(
            lambda c: c.tables == "row_wise" and c.table_gradients != "rows",
            "optimizer.tables is row_wise and optimizer.table_gradients is not rows",
        ),
    ] = "fp32"
    """Dense gradients of the memory tables. fp32: 4 bytes per element; bf16: 2, where each lookup's sums are added in fp32
    and rounded stochastically. See docs/memory-parallel.md."""
    table_folder: Annotated[
        FolderPath | None,
        EffectiveWhen(
            lambda c: c.tables == "row_wise" and c.table_gradients == "rows",
            "optimizer.tables is row_wise and table_gradients is rows",
        ),
    ] = None
    """Folder of a disk of the rank's own machine, or /dev/shm for its memory, in which the tables lie with their state, of
    families whose rows tokens alone choose: a thread fetches the rows of a step during the one before, and writes them
    back. Tables of a second family with learned keys stay on the device. Files have no name and are gone when the run
    ends, however it does. null: all on the device. See docs/engram.md."""
    value_offload: Annotated[
        Literal["none", "cpu"], EffectiveWhen(lambda c: c.tables == "adamw", "optimizer.tables is adamw")
    ] = "none"
    """cpu: fp32 main weights and Adam moments of the memory tables are kept and stepped in host memory, 12 bytes
    per element that a rank owns, by DeepSpeed's CPU Adam if deepspeed is installed, else by PyTorch's fused AdamW;
    none: on the device. See docs/memory-parallel.md."""
    value_lr: NonNegativeFloat | None = None
    """Learning rate of values and pre-values at every step, whatever the backbone's (1e-3 for Memory+ in
    UltraMemV2's public code); null: value_lr_multiplier times the backbone's."""
    value_lr_multiplier: Annotated[
        NonNegativeFloat, EffectiveWhen(lambda c: c.value_lr is None, "optimizer.value_lr is null")
    ] = 1.0
    """Learning rate of values and pre-values over that of the backbone, at the start."""
    value_lr_end_multiplier: Annotated[
        NonNegativeFloat | None, EffectiveWhen(lambda c: c.value_lr is None, "optimizer.value_lr is null")
    ] = None
    """Learning rate of values and pre-values over that of the backbone, after value_lr_decay_tokens; null: constant."""
    value_lr_decay_tokens: Annotated[
        NonNegativeInt,
        EffectiveWhen(
            lambda c: c.value_lr_end_multiplier is not None and c.value_lr is None,
            "optimizer.value_lr_end_multiplier is set and optimizer.value_lr is null",
        ),
    ] = 0
    """Tokens over which the multiplier goes linearly from its start to its end; 0: the whole run, or stage."""
    value_lr_from: Annotated[
        Origin,
        EffectiveWhen(
            lambda c: c.value_lr_end_multiplier is not None and c.value_lr is None,
            "optimizer.value_lr_end_multiplier is set and optimizer.value_lr is null",
        ),
    ] = "run"
    """Start from which the tables' multiplier counts tokens: the stage's, or the run's."""
    pre_value_lr_multiplier: NonNegativeFloat | None = None
    """Learning-rate multiplier of the pre-value tables alone, constant; null: they follow the values."""
    retrieval_lr: NonNegativeFloat | None = None
    """Learning rate of the memory layers' matrices (queries, keys, projections, cores) at every step, whatever the
    backbone's, as value_lr is for the tables; null: the backbone's."""
    retrieval_weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay of the memory layers' matrices; null: weight_decay."""
    trained_layers: tuple[PositiveInt, ...] | None = None
    """Numbers of the layers that are trained, the first of which is 1. Everything else stays as it is and has neither
    gradients nor optimizer state: other layers, embedding, final norm, output projection, and tables that no trained
    layer reads. null: all of the model. See docs/stages.md."""
    trained_rows: TrainedRowsConfig | None = None
    """Rows of tables that are trained, and nothing else, of those that the trained layers read; null: everything else is
    trained, too. It takes tables: row_wise, table_gradients: rows and value_weight_decay: 0. See docs/patches.md."""

    @property
    def trained(self) -> Trained:
        """The part of the model that is trained."""
        return Trained(self.trained_layers, tables_alone=self.trained_rows is not None)


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
