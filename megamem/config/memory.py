"""Configuration that every memory has, whichever its family: its place, and what other modules ask of its config.

A family's own config is under `megamem/families/<kind>/`; those that retrieve from a grid of keys build on
`megamem.retrieval.config`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal, Self

from megamem.config.base import Config
from megamem.placement.sharing import SharingPlan
from megamem.placement.slots import BESIDE, INSERTED, INSTEAD, SKIP, Slot
from megamem.placement.spans import PlacementConfig, Span, parse_spans

Control = Literal["none", "one_row", "others_rows"]


@dataclass(frozen=True)
class Table:
    """One table of a bank: a parameter [rows of the bank, width].

    Attributes:
        name: name of the parameter, `banks.<bank>.<name>`.
        width: its columns, on all ranks of the memory group together.
        key: the field of the config that sets the width, for messages.
        group: the optimizer group that steps it, with a learning rate of its own.
    """

    name: str
    width: int
    key: str
    group: Literal["values", "pre_values"] = "values"


@dataclass(frozen=True)
class LookupShape:
    """Request of a layer to its bank for one token, see `megamem.banks.bank.TableLookup`.

    Attributes:
        rows: J, rows read.
        scores: C, scores per row.
        bins: B, sums per token.
        activation: function of the products of the pre-values.
        learns_scores: scores have gradients; those of rows that are read unweighted have none.
    """

    rows: int
    scores: int = 1
    bins: int = 1
    activation: Literal["none", "gelu"] = "none"
    learns_scores: bool = True

    @classmethod
    def apart(cls, rows: int) -> Self:
        """Rows that no score sums (`megamem.layers.read_apart`)."""
        return cls(rows, bins=rows, learns_scores=False)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the auxiliary losses of a layer (`megamem.layers.losses`); 0 switches one off.

    `balance_sequences` are those over which the balance of keys takes its statistics.
    """

    tucker_penalty: float = 0.0
    tucker_margin: float = 0.0
    key_balance: float = 0.0
    balance_sequences: int = 1

    @property
    def any(self) -> bool:
        """True if one of the losses is switched on."""
        return self.tucker_penalty > 0 or self.key_balance > 0


@dataclass(frozen=True)
class ObservedQuantities:
    """Observable quantities of a layer besides its rows and its output (`megamem.layers.usage`).

    Attributes:
        scores: its rows have scores.
        spectrum: (H, R), heads and singular values of each one's core; None: it has no cores.
        router: a softmax weights its rows, with a last place for adding nothing.
    """

    scores: bool = False
    spectrum: tuple[int, int] | None = None
    router: bool = False


@dataclass(frozen=True)
class Backbone:
    """The surrounding model, as far as a memory may have to fit it.

    Attributes:
        hidden_size: width of the residual stream.
        num_heads: query heads of attention.
        query_groups: key/value heads of attention.
        head_dim: columns of a head.
        latent_dim: width of attention's latents; None: it has none.
        vocab_size: token ids; None: as many as the tokenizer has.
        num_memory_layers: layers of the memory.
        has_experts: feed-forwards are mixtures of experts.
    """

    hidden_size: int
    num_heads: int
    query_groups: int
    head_dim: int
    latent_dim: int | None
    vocab_size: int | None
    num_memory_layers: int
    has_experts: bool


class Scoring(Enum):
    """Score by which an entry is one of the K best of a head, or what stands in its place."""

    TUCKER = "tucker"
    """The Tucker-decomposed score of its row and its column."""
    PRODUCT = "product"
    """The sum of its row's score and its column's, for halves of projected queries."""
    HEADS = "heads"
    """The sum of both scores, for halves of attention's heads' outputs; each head's values are summed by themselves."""
    ROWS = "rows"
    """The score of a key of its own."""
    NGRAMS = "ngrams"
    """None: hashes of a token's n-grams are the rows."""
    TOKENS = "tokens"
    """None: the rows are those of a token's id."""


@dataclass(frozen=True)
class Ngrams:
    """N-grams of token ids whose hashes are the rows that a token reads.

    Attributes:
        max_order: tokens of the longest n-gram; there are those of every order from 2 on.
        boundary_id: token id that stands for what is not there.
        cuts_at_boundary: a token of that id hides all older ones from those behind it.
        head_rows: rows of every head, by memory layer, order by order; each order has as many heads.
        epsilons: epsilons of the norms of keys, queries and the convolution's inputs; None: the model's.
    """

    max_order: int
    boundary_id: int
    cuts_at_boundary: bool
    head_rows: tuple[tuple[int, ...], ...]
    epsilons: tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class MemoryConfig(Config, ABC):
    """One memory layer, the same in every block that has one. The methods below say what others read of it."""

    has_kinds: ClassVar[bool] = True
    """One for each family."""
    scoring: ClassVar[Scoring | None] = None
    """Scoring by which the family's layers choose what they read; None: exported models know no such family."""
    slot: ClassVar[Slot | None] = None
    """Slot in which the family's layers act; None: around the feed-forward, as `placement` says of each."""
    reads_tokens: ClassVar[bool] = False
    """True if the family's layers ask for token ids or positions."""
    expands_values: ClassVar[bool] = False
    """True if every head makes values of its own of a row, which may be done once for all rows where nothing is trained
    (`megamem.layers.layer.MemoryLayer.expand_values`); those of all heads are as wide as the model."""
    follows_heads: ClassVar[bool] = False
    """True if a tensor-parallel rank reads the columns of its own heads of attention, where it has whole heads
    (`megamem.banks.bank.TableLookup.read_heads`)."""
    reads_once: ClassVar[bool] = False
    """True if the layers of a chunk read their tables together (`megamem.layers.shared_read`)."""
    follows_width: ClassVar[bool] = False
    """True if the family's weights and their rates have a rule for other widths of the model (`model.mup`): its layer says
    of each weight how it follows the width, and its initial distributions agree. Widths inside of memories stay."""
    rows_are_known: ClassVar[bool] = False
    """True if tokens alone say which rows are read (`megamem.model.MemoryGPTModel.rows_read`), or among which layers choose."""
    chooses_among_rows: ClassVar[bool] = False
    """True if every layer reads some alone of the rows that tokens say."""

    kind: str
    """The family of memories. Leave `model.memory` out (or null) for a dense model."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Blocks that have a memory."""
    control: Control = "none"
    """Rows that are read in place of those asked for, to find out what addresses are worth (`megamem study compare
    --controls`). one_row: row 0 of the bank; others_rows: those that a token of another sequence of the microbatch asks
    for; none: no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_inserted and (self.reads_once or self.width("pre_values")):
            raise ValueError(
                f"model.memory.placement.position is inserted, where tables begin as zeros, but kind {self.kind} "
                "normalises its rows or multiplies them with pre-values, and so cannot learn from zeros: choose another "
                "kind, or one without pre-values (pre_value_dim: 0)"
            )
        spans = self.placement.spans
        if self.reads_once and spans is not None and any(span.is_skip for span in parse_spans(spans)):
            raise ValueError(
                f"model.memory.placement.spans is {spans}, but layers of kind {self.kind} read their tables together and "
                "add where they weigh them: use model.memory.placement.blocks"
            )

    def check(self, backbone: Backbone) -> None:
        """Refuse a model that this memory does not fit.

        Raises:
            ValueError: the memory does not fit the model; the message has key, value and fix.
        """

    def sized(self, vocab_size: int) -> Self:
        """This memory for so many token ids, where its tables' sizes are left to them."""
        return self

    @property
    def tensor_sizes(self) -> Mapping[str, int]:
        """By key, the numbers that tensor parallelism splits, and so must divide."""
        return {}

    def slot_of(self, span: Span) -> Slot:
        """Slot in which the memory layer with this span acts."""
        if self.slot is not None:
            return self.slot
        if span.is_skip:
            return SKIP
        return {each.name: each for each in (BESIDE, INSTEAD, INSERTED)}[self.placement.position]

    def num_lookups(self, num_layers: int) -> int:
        """Lookups of a model, or of a chunk of it, with so many memory layers: one of each, or one of all together."""
        return min(num_layers, 1) if self.reads_once else num_layers

    @property
    def is_inserted(self) -> bool:
        """True if the memories stand in inserted blocks, which add nothing else to the residual stream."""
        if self.slot is not None:
            return self.slot.is_inserted
        return self.placement.spans is None and self.placement.position == "inserted"

    @property
    def placement_keys(self) -> tuple[str, ...]:
        """Keys of `placement` that are read, besides those that name blocks."""
        around = ("spans", "position") if self.slot is None else ()
        return (*around, *(("query_group",) if self.has_queries else ()), *(("norm",) if self.is_inserted else ()))

    @property
    def has_queries(self) -> bool:
        """True if hidden states around the feed-forward say what is read."""
        return self.slot is None and not self.reads_tokens

    @property
    @abstractmethod
    def tables(self) -> tuple[Table, ...]:
        """The tables of each bank."""

    @property
    @abstractmethod
    def lookup(self) -> LookupShape:
        """Request of a layer to its bank for one token."""

    @abstractmethod
    def plan(self, num_layers: int) -> SharingPlan:
        """The banks of a model with `num_layers` memory layers, and what each layer sees of which."""

    @property
    def known_rows(self) -> int:
        """Rows per token that are known before they are read (`rows_are_known`), or among which layers choose."""
        return self.lookup.rows

    @property
    def follows_head_width(self) -> bool:
        """True if `follows_width` holds where attention's heads are wider, too, and not more of them."""
        return True

    @property
    def initialised_by(self) -> str:
        """Source of the initial weights, in one word."""
        return "constants"

    @property
    def loss_weights(self) -> LossWeights:
        """The auxiliary losses."""
        return LossWeights()

    @property
    def is_ordered_by_seed(self) -> bool:
        """True if the run's seed says which row a key reads: with another seed, a trained table would be read elsewhere."""
        return False

    @property
    def observed(self) -> ObservedQuantities:
        """Quantities that usage metrics report besides rows and outputs."""
        return ObservedQuantities()

    @property
    def ids_before(self) -> int:
        """Token ids before its own that a token's rows depend on."""
        return 0

    def num_addresses(self, num_layers: int) -> int:
        """Integers that so many memory layers of a chunk make of every token (`MemoryLayer.addresses`)."""
        return 0

    def ngrams(self, num_layers: int) -> Ngrams | None:
        """The n-grams that address the rows of a model with `num_layers` memory layers, if they do."""
        return None

    @property
    def kept_files(self) -> Mapping[str, str]:
        """Keys that name a file which every layer keeps whole in a buffer, and the buffer's name, by key."""
        return {}

    @property
    def fixed_bytes(self) -> int:
        """Bytes of what a layer, or a chunk whose layers read together, holds on the device and never trains."""
        return 0

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots that every token weighs in every layer; none where rows are retrieved."""
        return ()

    def width(self, table: str) -> int:
        """Columns of a table; 0 if there is none of that name."""
        return next((each.width for each in self.tables if each.name == table), 0)

    @property
    def row_width(self) -> int:
        """Columns of all tables of a bank."""
        return sum(table.width for table in self.tables)
