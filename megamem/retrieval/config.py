"""The configs of families that retrieve from an N x N grid of keys: by Tucker-decomposed scores, or by product keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from megamem.config.base import EffectiveWhen, LossWeight
from megamem.config.identity import Role
from megamem.config.memory import Backbone, LookupShape, LossWeights, MemoryConfig, ObservedQuantities, Scoring, Table
from megamem.placement.sharing import LayerView, SharingConfig, SharingPlan, plan_grids

Initialisation = Literal["paper", "matched", "released"]


@dataclass(frozen=True)
class RetrievalConfig(MemoryConfig):
    """A layer that retrieves K rows per token and head, and adds up their values by score."""

    num_keys: PositiveInt = 64
    """N: keys per side of one layer's own table, which has N^2 rows. Sharing a window of g tables raises a layer's keys
    to floor(N sqrt(g))."""
    key_dim: PositiveInt = 32
    """Dimension of one query and one key, per side (and Tucker rank)."""
    value_dim: PositiveInt = 64
    """V: columns of the value table; hidden_size where no value projection follows."""
    top_k: PositiveInt = 16
    """K: values retrieved per token and head."""
    row_top_k_limit: PositiveInt = 128
    """The most rows and columns kept by the first selection stage, which otherwise keeps K of each (UltraMemV2, section
    4.1)."""
    num_heads: PositiveInt = 1
    """H: retrieval heads, each with its own keys and cores. With Tucker cores they share their queries (as released,
    but see queries_per_head); with product keys each has its own."""
    key_balance_weight: LossWeight = 0.0
    """Weight (beta) of the key-balance loss, Eq. 19, per layer, with selection frequencies that sum to 1 as released;
    0: off, as in the paper."""
    key_balance_sequences: Annotated[
        PositiveInt, Role.RUNNING, EffectiveWhen(lambda c: c.key_balance_weight > 0, "key_balance_weight is above 0")
    ] = 1
    """Consecutive sequences over which the loss takes its shares and its mean probabilities; a divisor of
    train.micro_batch_size, all of which the release takes."""
    sharing: SharingConfig = field(default_factory=SharingConfig)
    """Sharing of tables among layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_top_k > self.expansion * self.num_keys:
            raise ValueError(
                f"model.memory.num_keys is {self.num_keys}, but {self.row_top_k} rows are to be selected (the smaller "
                "of top_k and row_top_k_limit): raise num_keys or lower top_k"
            )
        if self.row_top_k**2 < self.top_k:
            raise ValueError(
                f"model.memory.top_k is {self.top_k}, but row_top_k_limit = {self.row_top_k_limit} leaves a grid of "
                f"{self.row_top_k**2} candidates: "
                f"raise row_top_k_limit to at least {math.isqrt(self.top_k - 1) + 1}"
            )

    def check(self, backbone: Backbone) -> None:
        self.sharing.check(backbone.num_memory_layers)

    @property
    @abstractmethod
    def num_queries(self) -> int:
        """Query vectors per token, for all heads together."""

    @property
    def expansion(self) -> int:
        """e: keys per side over the square root of the rows that they address."""
        return 1

    @property
    def row_top_k(self) -> int:
        """M: rows (and columns) that the first selection stage keeps."""
        return min(self.top_k, self.row_top_k_limit)

    def num_key_vectors(self, view: LayerView) -> int:
        """Keys of one layer, of both sides and all heads."""
        return 2 * self.num_heads * self.expansion * view.num_keys

    def plan(self, num_layers: int) -> SharingPlan:
        return plan_grids(self.sharing, self.num_keys, num_layers)

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.num_heads * self.top_k)

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(key_balance=self.key_balance_weight, balance_sequences=self.key_balance_sequences)

    @property
    def observed(self) -> ObservedQuantities:
        return ObservedQuantities(scores=True)


@dataclass(frozen=True)
class TuckerConfig(RetrievalConfig):
    """Retrieval by Tucker-decomposed scores (TDQKR; UltraMem and UltraMemV2), always with a value projection.

    Queries, value blocks and pre-values are fields of a family in which they are chosen, and properties of another.
    """

    scoring: ClassVar[Scoring | None] = Scoring.TUCKER
    """By scores of a grid's entries that are decomposed."""
    follows_width: ClassVar[bool] = True
    """Keys and values keep their widths; queries and pre-values are made of the stream."""
    default_expansion: ClassVar[int] = 1
    """e of the family where key_expansion is null."""

    tucker_rank: PositiveInt = 2
    """R: Tucker rank, the row (and column) scores per key."""
    num_cores: PositiveInt = 2
    """C: Tucker cores; core c weights its own V/C columns of the values (2 as released, 1 as in the paper's text)."""
    key_expansion: PositiveInt | None = None
    """e: e times the keys per side address e^2 virtual blocks that read the same rows (Eq. 8); null: the family's own,
    2 in UltraMem and else 1."""
    shuffle: Literal["keyed", "table", "none"] = "keyed"
    """Way of breaking the row/column topology: a stateless keyed bijection, a stored permutation (8 bytes per entry and
    layer), or none."""
    initialisation: Initialisation = "paper"
    """paper: sigma_V of Eq. 26 with calibrated score gain; matched: the same with the SwiGLU's true variance, a third
    of Eq. 25's; released: the public constants (as always with product keys)."""
    tucker_penalty_weight: Annotated[
        LossWeight, EffectiveWhen(lambda c: c.tucker_rank > 1, "tucker_rank is above 1")
    ] = 0.0
    """Weight (alpha) of the penalty on the cores' non-leading singular values, Eq. 17, per layer; 0: off, as in the
    paper."""
    tucker_penalty_margin: Annotated[
        NonNegativeFloat,
        Role.RUNNING,
        EffectiveWhen(lambda c: c.tucker_penalty_weight > 0, "tucker_penalty_weight is above 0"),
    ] = 0.15
    """tau of Eq. 17: singular values up to this cost nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_dim % self.num_cores:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, which num_cores = {self.num_cores} does not divide: each "
                "core weights its own slice of the values"
            )

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if backbone.has_experts and self.initialisation == "matched":
            raise ValueError(
                "model.memory.initialisation is matched, which takes the variance of a dense SwiGLU, but model.moe is "
                "set: use paper or released"
            )

    @property
    def is_ordered_by_seed(self) -> bool:
        return self.shuffle == "keyed"

    @property
    @abstractmethod
    def query(self) -> Literal["per_rank", "per_head", "single"]:
        """Sharing of queries: each Tucker rank or each head has its own, or all have the same."""

    @property
    @abstractmethod
    def value_blocks(self) -> Literal["summed", "projected"]:
        """Value projections: one for all virtual blocks, or one for each."""

    @property
    def pre_value_dim(self) -> int:
        """P: columns of the pre-value table; 0: there is none."""
        return 0

    @property
    def pre_value_activation(self) -> Literal["none", "gelu"]:
        """Activation of the pre-value products."""
        return "none"

    @property
    def num_queries(self) -> int:
        return 2 * math.prod(self.query_shape)

    @property
    def query_shape(self) -> tuple[int, int]:
        """Queries per side: of heads, and of Tucker ranks; 1 where all have the same."""
        return (
            self.num_heads if self.query == "per_head" else 1,
            self.tucker_rank if self.query == "per_rank" else 1,
        )

    @property
    def expansion(self) -> int:
        return self.key_expansion if self.key_expansion is not None else self.default_expansion

    @property
    def num_value_projections(self) -> int:
        """B: virtual blocks with a value projection each; 1 if all have the same."""
        return self.expansion**2 if self.value_blocks == "projected" else 1

    def num_key_vectors(self, view: LayerView) -> int:
        return self.tucker_rank * super().num_key_vectors(view)

    @property
    def tables(self) -> tuple[Table, ...]:
        values = Table("values", self.value_dim, "value_dim")
        if self.pre_value_dim == 0:
            return (values,)
        return values, Table("pre_values", self.pre_value_dim, "pre_value_dim", group="pre_values")

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(
            rows=self.num_heads * self.top_k,
            scores=self.num_cores,
            bins=self.num_value_projections,
            activation=self.pre_value_activation,
        )

    @property
    def initialised_by(self) -> str:
        return self.initialisation

    @property
    def loss_weights(self) -> LossWeights:
        return replace(
            super().loss_weights,
            tucker_penalty=self.tucker_penalty_weight,
            tucker_margin=self.tucker_penalty_margin,
        )

    @property
    def observed(self) -> ObservedQuantities:
        return ObservedQuantities(scores=True, spectrum=(self.num_heads, self.tucker_rank))


@dataclass(frozen=True)
class ProductKeyConfig(RetrievalConfig):
    """Retrieval by product keys (PKM, Memory+, PEER)."""

    scoring: ClassVar[Scoring | None] = Scoring.PRODUCT
    """By sums of a row's and a column's score."""
    width_advice: ClassVar[str] = ""
    """Advice of a family, for the message, on what else fits a value_dim that is not hidden_size."""

    query_norm: bool = True
    """RMS-normalise the queries of product keys, as UltraMemV2's public code does; Meta's release does not."""
    biases: bool = False
    """Biases in every projection of the layer, as in Meta's release."""

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if not self.has_value_projection and self.value_dim != backbone.hidden_size:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but kind {self.kind} has no value projection: set it to "
                f"hidden_size = {backbone.hidden_size}" + self.width_advice
            )

    @property
    def has_value_projection(self) -> bool:
        """True if a projection follows the summed values."""
        return True

    @property
    def has_output_gate(self) -> bool:
        """True if a scalar per token gates the output."""
        return False

    @property
    def num_queries(self) -> int:
        return 2 * self.num_heads

    @property
    def initialised_by(self) -> str:
        return "released"
