"""The config of Engram."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Le
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megamem.config.base import Advice, EffectiveWhen
from megamem.config.identity import Role
from megamem.config.memory import Backbone, LookupShape, MemoryConfig, Ngrams, Scoring, Table
from megamem.placement.sharing import BankSpec, LayerView, SharingPlan
from megamem.placement.slots import ENTRY, Slot

from .hashing import head_sizes


@dataclass(frozen=True)
class EngramConfig(MemoryConfig):
    """One layer: rows addressed by hashes of the last two to N tokens, gated by the residual stream."""

    slot: ClassVar[Slot | None] = ENTRY
    """The residual stream before attention."""
    scoring: ClassVar[Scoring | None] = Scoring.NGRAMS
    """Nothing is scored."""
    follows_width: ClassVar[bool] = True
    """Scores are products of two vectors of the stream's width, the rest are vectors and maps from rows."""
    reads_tokens: ClassVar[bool] = True
    """Their n-grams are hashed."""

    rows_are_known: ClassVar[bool] = True
    """By their hashes."""

    kind: Literal["engram"] = "engram"
    """engram: rows addressed by hashes of the last tokens, added before attention."""
    rules: Literal["engram", "ple"] = "engram"
    """Rules by which tokens are hashed. engram: as DeepSeek's: tokens before a sequence's start read boundary_id, and
    NumPy's PCG64 draws multipliers from the block's number. ple: as Qwen's: boundary_id also cuts the window behind it, and
    SplitMix64 draws them from the layer's place among the memory layers."""
    max_order: Annotated[int, Ge(2), Le(4), Advice("n-grams have 2 to 4 tokens")] = 3
    """N: tokens of the longest n-gram; every order from 2 on has heads of its own."""
    heads_per_order: Annotated[
        PositiveInt, Le(1024), Advice("each has a table of its own, of another prime number of rows")
    ] = 8
    """K: heads of each order, each with rows of its own."""
    rows_per_head: Annotated[int, Ge(2), Advice("a head's table has a prime number of rows")] = 1024
    """Least rows of a head's table: the heads of all layers have the primes from here on."""
    rows_multiple: PositiveInt = 128
    """A layer's table is padded to a multiple of so many rows."""
    value_dim: PositiveInt = 16
    """V: columns of a row. A token's memory is the rows of its (N - 1) K heads, side by side."""
    conv_kernel: NonNegativeInt = 4
    """Taps of the causal convolution behind the gate, N tokens apart; 0 leaves it out."""
    projection_biases: bool = True
    """Biases of the key and value projections."""
    key_epsilon: PositiveFloat | None = None
    """Added to the mean square in the norm of keys; null: model.norm_epsilon."""
    query_epsilon: PositiveFloat | None = None
    """Added to the mean square in the norm of the residual stream before the gate; null: model.norm_epsilon."""
    conv_epsilon: Annotated[
        PositiveFloat | None, EffectiveWhen(lambda c: c.conv_kernel > 0, "conv_kernel is above 0")
    ] = None
    """Added to the mean square in the norm of the convolution's inputs; null: model.norm_epsilon."""
    vocab_size: PositiveInt | None = None
    """Token ids that are hashed; null: all, as many as model.vocab_size says, or the tokenizer of the data set has."""
    boundary_id: NonNegativeInt = 0
    """Token id that stands for what is not there, see `rules`: a padding or end-of-document token."""
    hash_seed: NonNegativeInt = 0
    """Seed of the multipliers."""
    token_map: Annotated[str | None, Role.RUNNING] = None
    """File of `megamem data compress`, which maps token ids to fewer, read once when a run begins and kept in its
    checkpoints; null: ids are hashed as they are."""
    compressed_vocab_size: Annotated[
        PositiveInt | None, EffectiveWhen(lambda c: c.token_map is not None, "model.memory.token_map is set")
    ] = None
    """Ids that `token_map` maps to, as `megamem data compress` prints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.token_map is None) != (self.compressed_vocab_size is None):
            raise ValueError(
                f"model.memory.token_map is {self.token_map} and compressed_vocab_size {self.compressed_vocab_size}: the "
                "hashes depend on both, set both as `megamem data compress` prints them, or neither"
            )
        if self.rules == "ple" and self.token_map is not None:
            raise ValueError(
                f"model.memory.token_map is {self.token_map}, but rules are ple, which hash token ids as they are: leave "
                "token_map out, or use rules: engram"
            )

    def check(self, backbone: Backbone) -> None:
        num_ids = backbone.vocab_size if self.vocab_size is None else self.vocab_size
        if backbone.vocab_size is not None and num_ids is not None and num_ids < backbone.vocab_size:
            raise ValueError(
                f"model.memory.vocab_size is {num_ids}, but there are {backbone.vocab_size} token ids to hash: set "
                "model.memory.vocab_size: null, and it follows"
            )
        if num_ids is not None and self.boundary_id >= num_ids:
            raise ValueError(
                f"model.memory.boundary_id is {self.boundary_id}, but there are {num_ids} token ids, from 0 on: name one "
                "of them"
            )

    def sized(self, vocab_size: int) -> Self:
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    @property
    def cuts_at_boundary(self) -> bool:
        """True if a token of boundary_id hides all older ones from those behind it."""
        return self.rules == "ple"

    @property
    def zero_has_sign(self) -> bool:
        """True if the gate of a score of 0 is that of the least score, as in the module without biases and convolution
        (DeepSeek V4.1); in the others it is 1/2."""
        return not self.conv_kernel and not self.projection_biases

    @property
    def num_heads(self) -> int:
        """H = (N - 1) K: rows of a token."""
        return (self.max_order - 1) * self.heads_per_order

    @property
    def memory_width(self) -> int:
        """E = H V: columns of what a token reads."""
        return self.num_heads * self.value_dim

    @property
    def reach(self) -> int:
        """Tokens before its own that a token's convolution reads: (taps - 1) N."""
        return max(0, self.conv_kernel - 1) * self.max_order

    @property
    def ids_before(self) -> int:
        return self.max_order - 1

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("gate",)

    def num_addresses(self, num_layers: int) -> int:
        return num_layers * self.num_heads

    def ngrams(self, num_layers: int) -> Ngrams:
        epsilons = (self.key_epsilon, self.query_epsilon, self.conv_epsilon)
        return Ngrams(self.max_order, self.boundary_id, self.cuts_at_boundary, self.sizes(num_layers), epsilons)

    @property
    def kept_files(self) -> Mapping[str, str]:
        return {"token_map": "token_map"} if self.token_map is not None else {}

    @property
    def fixed_bytes(self) -> int:
        return 8 * (self.vocab_size or 0) if self.token_map is not None else 0

    @property
    def num_hashed_ids(self) -> int:
        """U: ids that multipliers must not overflow with."""
        num_ids = self.compressed_vocab_size or self.vocab_size
        assert num_ids is not None
        return num_ids

    def sizes(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Rows of every head, by memory layer, order-major."""
        return _sizes(self.rows_per_head, self.max_order - 1, self.heads_per_order, num_layers)

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def lookup(self) -> LookupShape:
        return LookupShape.apart(self.num_heads)

    def plan(self, num_layers: int) -> SharingPlan:
        rows = [-(-sum(sizes) // self.rows_multiple) * self.rows_multiple for sizes in self.sizes(num_layers)]
        return SharingPlan(
            tuple(BankSpec(layer, number, (layer,)) for layer, number in enumerate(rows)),
            tuple(LayerView(layer, 0, number, number) for layer, number in enumerate(rows)),
        )


@lru_cache(maxsize=64)
def _sizes(budget: int, num_orders: int, heads: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    return head_sizes((budget,) * num_orders, heads, num_layers)
