"""The base of every memory layer: its place in the model, its bank, and what is asked of it.

Legend: s sequence length and b sequences of this rank, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from kernels.select import Kernels
from megamem.banks.bank import TableLookup
from megamem.chunk.halo import UNCUT, Halo
from megamem.chunk.inputs import Inputs
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.config.width import Width
from megamem.layers.losses import AuxiliaryLosses, begin_losses
from megamem.layers.usage import ReadObserver
from megamem.parameters.declaration import GroupName, Matrices, ReducedOver, declare, parameter_device
from megamem.placement.sharing import LayerView


@dataclass(frozen=True)
class ScoreCalibration:
    """Statistics of the retrieved scores that initialisation needs.

    Attributes:
        gain: gain of the query norm and of the key norm, at which the mean retrieved score of a core is 1.
        sigma_s: standard deviation of the retrieved scores of a core at that gain.
    """

    gain: float
    sigma_s: float


class MemoryLayer(MegatronModule):
    """Reads rows of a bank for every token, and makes of them what the memory adds to the residual stream.

    The weights are replicated over tensor-parallel ranks, each of which sees its own share of the sequence; so Megatron
    sums their gradients over those too. The tables belong to the model and are reached through `lookup`.

    Attributes:
        cores: [C, H, R, R], the Tucker cores; None in layers without.
        losses: the auxiliary losses; None while all are off.
        usage: observer of the layer's reads; None: nobody observes them.
        halo: reaches the tokens before those of this rank, between the tensor-parallel regions.
        place: its number among its family's layers of its chunk, which the model sets.
        first_address: place of its family's addresses among those of a chunk (`Inputs.addresses_of`), which the model sets.
    """

    cores: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        memory: MemoryConfig,
        view: LayerView,
        lookup: TableLookup,
        *,
        kernels: Kernels,
        name: str,
        seed: int,
        token_group: torch.distributed.ProcessGroup | None = None,
        tensor_group: torch.distributed.ProcessGroup | None = None,
        halo: Halo = UNCUT,
        num_streams: int | None = None,
    ) -> None:
        """Allocate the weights; `megamem.initialisation` fills them.

        Args:
            memory: config of the layer's own family.
            lookup: the bank; kept outside of the module tree, because it belongs to the model.
            kernels: kernels of retrieval and norms.
            name: the layer's global name, which with the seed keys what it draws by itself.
            token_group: tensor- and context-parallel ranks, which hold the other tokens of a microbatch; None: this
                rank holds all of them.
            tensor_group: tensor-parallel ranks, which hold the other heads of attention; None: this one holds all.
            halo: reaches the tokens before those of this rank, between the tensor-parallel regions.
            num_streams: n, residual streams; None: there is one.
        """
        super().__init__(config=config)
        self.name = name
        self.memory, self.view, self.lookup = memory, view, lookup
        self.kernels, self.tensor_group, self.halo = kernels, tensor_group, halo
        self.num_streams = num_streams
        self.place = self.first_address = 0
        self.epsilon = config.layernorm_epsilon
        weights = memory.loss_weights
        self.losses = AuxiliaryLosses(weights, token_group, parameter_device(config)) if weights.any else None
        self.usage: ReadObserver | None = None
        self.cores = None
        self._build(config.hidden_size, seed)

    @abstractmethod
    def _build(self, hidden_size: int, seed: int) -> None:
        """Allocate the family's weights and buffers."""

    @abstractmethod
    def forward(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The memory's output for what its slot gives it (`megamem.placement.slots`); it shows its reads to `observe`.

        Around the feed-forward both are [s, b, D], and `hidden` is the feed-forward's normalised input.
        """

    @classmethod
    def rows_read(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor) -> Mapping[int, Tensor]:
        """Rows of these layers' banks, by index, that a forward pass of whole sequences reads; for families with
        `MemoryConfig.rows_are_known`.

        Args:
            token_ids: [s, b] int64.
            positions: [s, b] int64.
        """
        return {}

    @classmethod
    def addresses(cls, layers: Sequence[Self], token_ids: Tensor, positions: Tensor, halo: Halo) -> Tensor | None:
        """Integers that these layers of one chunk need of the tokens, computed once per microbatch for all of them.

        Args:
            token_ids: [s, b] int64, of this context-parallel rank.
            positions: [s, b] int64.
            halo: reaches the tokens before those of this context-parallel rank.

        Returns:
            [A, s, b] int64, which `Inputs.addresses_of` hands to each layer; None: none. A is
            `MemoryConfig.num_addresses` of so many layers.
        """
        return None

    def hashed_ids(self, token_ids: Tensor) -> Tensor:
        """Ids by which n-grams of these token ids are told apart, of the same shape (`MemoryConfig.ngrams`)."""
        raise AssertionError(f"{type(self).__name__} reads no n-grams")

    def initial_output(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        """The memory's own output for `hidden` [s, b, D], whatever else its slot or its chunk give it; its variance is
        measured at initialisation."""
        out: Tensor = self(hidden, self.alone(inputs))
        return out

    def alone(self, inputs: Inputs) -> Inputs:
        """`inputs` of ids and positions, with the addresses of a chunk that has this layer alone."""
        addresses = (
            self.addresses([self], inputs.token_ids, inputs.positions, self.halo) if inputs.packed is not None else None
        )
        return inputs if addresses is None else inputs.with_addresses(addresses)

    def observe(self, rows: Tensor, scores: Tensor | None, out: Tensor, *, router: Tensor | None = None) -> None:
        """Show what was read to whoever observes it (`ReadObserver.record`)."""
        if self.usage is not None:
            self.usage.record(rows, scores, out, router)

    def slot_weights(self, *arguments: Any) -> Tensor:
        """[T, slots], how each token weighs the slots that the family names (`MemoryConfig.slot_names`), given what
        `forward` is given."""
        raise AssertionError(f"{type(self).__name__} names no slots")

    def calibrate(self, seed: int) -> ScoreCalibration | None:
        """Set what depends on other weights, once these are drawn; returns what it measured of its scores, if so."""
        return None

    def predicted_std(
        self, model: ModelConfig, table_std: float, calibration: ScoreCalibration | None, seed: int
    ) -> float | None:
        """Standard deviation of the initial output by the formula of the family's paper; None: there is none.

        `calibration` is what `calibrate` returned.
        """
        return None

    def expand_values(self) -> None:
        """Make the heads' own values of all rows once, for generation (`MemoryConfig.expands_values`)."""
        raise AssertionError(f"{type(self).__name__} expands no values")

    @classmethod
    def refresh(cls, layers: Sequence[Self]) -> None:
        """Refresh these layers of one model chunk once per optimizer step, before its first microbatch."""

    def _matrix(self, num_outputs: int, num_inputs: int, width: Width) -> nn.Parameter:
        """A weight [outputs, inputs] that maps one activation to another."""
        return self._weight(num_outputs, num_inputs, matrices=Matrices(), width=width)

    def _weight(self, *shape: int, matrices: Matrices | None = None, width: Width = Width.NEITHER) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=parameter_device(self.config)))
        # Gains and biases are not decayed.
        group: GroupName = "retrieval" if len(shape) > 1 else "backbone_no_decay"
        declare(weight, group, reduced_over=ReducedOver.TOKENS, matrices=matrices, width=width)
        return weight


def begin_step(layers: Sequence[MemoryLayer]) -> None:
    """To be called once per optimizer step for the layers of a chunk, before its first microbatch; never at evaluation.

    Refreshes what the family keeps between steps, and restarts the auxiliary losses. Each takes one decomposition for
    all layers: on a GPU every call waits for the device.
    """
    for of_family in by_family(layers):
        type(of_family[0]).refresh(of_family)
    begin_losses([(layer.losses, layer.cores) for layer in layers if layer.losses is not None])


def by_family(layers: Sequence[MemoryLayer]) -> list[list[MemoryLayer]]:
    """The layers of each family, in their order."""
    found: dict[type[MemoryLayer], list[MemoryLayer]] = {}
    for layer in layers:
        found.setdefault(type(layer), []).append(layer)
    return list(found.values())
