"""Common configuration of the memories that are indexed by the token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import PositiveInt

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.base import EffectiveWhen
from megamem.config.memory import Backbone, LookupShape, MemoryConfig, Scoring, Table
from megamem.placement.sharing import SharingPlan, private_banks
from megamem.placement.slots import Slot
from megamem.placement.spans import Span

_EDIT = "megamem.token_tables.attention:edit_values"

VALUES = Slot("values", _EDIT, module="self_attention", splits_latents=True, is_exported=True)
"""`forward(values, inputs, hidden)` returns attention's values [s, b, g, d], for the g key/value heads of this
tensor-parallel rank; `hidden` is attention's input [t, b, D]. In latent attention these are the latents that values are
made of, [t, b, d_c]; keys are made of them as they were."""
LATENTS = Slot("latents", _EDIT, module="self_attention", is_exported=True)
"""`forward(latents, inputs, hidden)` returns the latents [t, b, d_c] that keys and values are made of, of latent
attention's own; `hidden` is its input [t, b, D]."""


@dataclass(frozen=True)
class TokenTableConfig(MemoryConfig):
    """A bank with M consecutive rows, its slots, for every address: a token's id, or a hash of its n-grams.

    Row v M + i belongs to the i-th of M slots of address v, so that a token reads one piece of memory for each of its
    addresses.
    """

    scoring: ClassVar[Scoring | None] = Scoring.TOKENS
    reads_tokens: ClassVar[bool] = True
    """Their ids are the rows."""
    rows_are_known: ClassVar[bool] = True
    """By the tokens' ids."""
    multiplies_by_signs: ClassVar[bool] = False
    """True if a row's columns may have signs (`NgramAddressConfig.signs`)."""

    address: NgramAddressConfig | None = None
    """Addresses by hashes of the last tokens; null: the token's id is its one address."""
    vocab_size: Annotated[
        PositiveInt | None, EffectiveWhen(lambda c: c.address is None, "model.memory.address is null")
    ] = None
    """Token ids that have rows; null: all, as many as model.vocab_size says, or the tokenizer of the data set has."""
    value_dim: PositiveInt = 128
    """V: columns of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.address.signs != "none" and not self.multiplies_by_signs:
            raise ValueError(
                f"model.memory.address.signs is {self.address.signs}, but kind {self.kind} reads its rows as they are: use signs: "
                "none, or a kind of n-grams (value_ngrams, residual_ngrams, ngram_embedding)"
            )

    @property
    @abstractmethod
    def slots_per_address(self) -> int:
        """M: rows of an address."""

    @property
    def rows_per_token(self) -> int:
        """A M: rows that a token reads."""
        return self.slots_per_address * (1 if self.address is None else self.address.num_addresses)

    @property
    def fixed_bytes(self) -> int:
        if self.address is None or self.address.signs == "none":
            return 0
        return self.address.num_sign_patterns * self.value_dim

    @property
    def ids_before(self) -> int:
        return 0 if self.address is None else self.address.ids_before

    @property
    def exported(self) -> Mapping[str, str]:
        """Options of the family that exported code reads by the name of their key."""
        return {}

    def num_addresses(self, num_layers: int) -> int:
        return 0 if self.address is None else self.address.num_integers

    @property
    def tables(self) -> tuple[Table, ...]:
        return (Table("values", self.value_dim, "value_dim"),)

    @property
    def num_rows(self) -> int:
        """Rows of a bank; 0 where they are left to a vocabulary that is not known (`sized`)."""
        num_addresses = (self.vocab_size or 0) if self.address is None else self.address.num_hashed_rows
        return num_addresses * self.slots_per_address

    def sized(self, vocab_size: int) -> Self:
        if self.address is not None:
            return replace(self, address=self.address.sized(vocab_size))
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    def check(self, backbone: Backbone) -> None:
        num_ids = backbone.vocab_size
        if self.vocab_size is not None and num_ids is not None and num_ids > self.vocab_size:
            raise ValueError(
                f"model.memory.vocab_size is {self.vocab_size}, but there are {num_ids} token ids, and each has rows of "
                "its own: set model.memory.vocab_size: null, and it follows"
            )


@dataclass(frozen=True)
class NarrowRowsConfig(TokenTableConfig):
    """One row per address, of a table per layer, which a token reads side by side with those of its other addresses."""

    multiplies_by_signs: ClassVar[bool] = True
    """Rows are read apart."""

    @property
    def slots_per_address(self) -> int:
        return 1

    @property
    def memory_width(self) -> int:
        """E = A V: columns of what a token reads."""
        return self.rows_per_token * self.value_dim

    @property
    def lookup(self) -> LookupShape:
        return LookupShape.apart(self.rows_per_token)

    def plan(self, num_layers: int) -> SharingPlan:
        return private_banks(self.num_rows, num_layers)


@dataclass(frozen=True)
class ValuesConfig(TokenTableConfig):
    """Rows of the token join attention's values."""

    slot: ClassVar[Slot | None] = VALUES
    """The values of attention."""

    @abstractmethod
    def handed_to_heads(self, value_columns: int, *, follows_heads: bool) -> int:
        """Elements per token that a tensor-parallel rank hands to those that have the heads, of values with so many columns;
        `follows_heads`: rows come to the ranks of their heads anyway."""

    @property
    def handed_to_tokens(self) -> int:
        """Elements per token and key/value head that a tensor-parallel rank hands to those that have the tokens."""
        return 0


@dataclass(frozen=True)
class HeadValuesConfig(ValuesConfig):
    """Vectors of all heads' columns are added to the values of attention's heads, behind gates of its input's first channels."""

    gate_channels: PositiveInt = 12
    """First columns of attention's input, of which gates are made."""

    def handed_to_heads(self, value_columns: int, *, follows_heads: bool) -> int:
        return value_columns

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        if backbone.latent_dim is not None:
            raise ValueError(
                f"model.memory.kind is {self.kind}, which adds to the values of attention's heads, but model.latent_attention "
                "is set: leave it out, or use kind move or lave, which may have an address, too"
            )
        if self.gate_channels > backbone.hidden_size:
            raise ValueError(
                f"model.memory.gate_channels is {self.gate_channels}, but the stream has {backbone.hidden_size} columns: "
                "set so many at the most"
            )


@dataclass(frozen=True)
class MixedValuesConfig(ValuesConfig):
    """Rows of the token are mixed into attention's values, weighted by gates of attention's input."""

    follows_width: ClassVar[bool] = True
    """Rows are vectors, gates are made of the stream."""
    follows_heads: ClassVar[bool] = True
    """A rank reads the columns of its own heads' values."""

    mixed_into: Literal["values", "latents"] = "values"
    """Tensor that the rows are mixed into. values: attention's values; with model.latent_attention the latents that
    values are made of, while keys are made of latents as they are. latents: of latent attention, those of keys and
    values both (Eq. 7), which then are all that a cache holds."""
    num_gate_heads: PositiveInt = 4
    """Equal parts of the columns with gates of their own; one per key/value head is the paper's."""
    gated_standard_path: bool = True
    """Gate the attention's own value too; false: it enters as it is."""

    def handed_to_heads(self, value_columns: int, *, follows_heads: bool) -> int:
        return (0 if follows_heads else self.value_dim) + self.num_gate_heads * self.gated_standard_path

    @property
    def num_gates(self) -> int:
        """Gates per key/value head, with that of the standard path if it has one."""
        return self.rows_per_token + self.gated_standard_path

    def slot_of(self, span: Span) -> Slot:
        return VALUES if self.mixed_into == "values" else LATENTS

    @property
    def slot_names(self) -> tuple[str, ...]:
        standard = ("own value",) if self.gated_standard_path else ()
        return (*standard, *(str(slot) for slot in range(1, self.rows_per_token + 1)))

    @property
    def tensor_sizes(self) -> Mapping[str, int]:
        # Latents are whole on every rank that makes heads of them.
        return {"num_gate_heads": self.num_gate_heads} if self.mixed_into == "values" else {}

    @property
    def lookup(self) -> LookupShape:
        return LookupShape(self.rows_per_token, scores=self.num_gate_heads)

    def check(self, backbone: Backbone) -> None:
        super().check(backbone)
        query_groups, head_dim, latent_dim = backbone.query_groups, backbone.head_dim, backbone.latent_dim
        if self.mixed_into == "latents" and latent_dim is None:
            raise ValueError(
                "model.memory.mixed_into is latents, but model.latent_attention is null: set it, or use mixed_into: values"
            )
        if latent_dim is not None and self.value_dim != latent_dim:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but a token's latent has {latent_dim} columns: set "
                f"model.memory.value_dim: {latent_dim}"
            )
        if latent_dim is None and self.value_dim != query_groups * head_dim:
            raise ValueError(
                f"model.memory.value_dim is {self.value_dim}, but a token's {query_groups} values of {head_dim} columns "
                f"have {query_groups * head_dim}: set model.memory.value_dim: {query_groups * head_dim}"
            )
        if self.value_dim % self.num_gate_heads:
            divisor = (
                f"attention's {query_groups} key/value heads do" if latent_dim is None else "use one of its divisors"
            )
            raise ValueError(
                f"model.memory.num_gate_heads is {self.num_gate_heads}, which does not divide value_dim = "
                f"{self.value_dim}: {divisor}"
            )
