"""The section `optimizer` of a configuration. The docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Le, Lt
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megamem.config.base import Advice, Config, EffectiveWhen
from megamem.parameters.trained_part import Trained
from pretrain.config.fields import FilePath, FolderPath

Beta = Annotated[NonNegativeFloat, Lt(1)]
Origin = Literal["stage", "run"]
ShareOfRows = Annotated[PositiveFloat, Le(1), Advice("it is a share of rows")]
ShareOfRate = Annotated[NonNegativeFloat, Le(1), Advice("it is a share of optimizer.lr")]


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
