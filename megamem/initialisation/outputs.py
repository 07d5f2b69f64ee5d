"""The initial outputs of memory layers and feed-forwards, predicted and measured without a model or a full table.

A layer is built on its own, with the weights that a run with this seed gives it, and reads random tokens of mean square
1, as a norm delivers them. The rows that they hit are drawn by the tables' own generator, so the figures are those of
the run's own tables. Some inner units stand for a wide feed-forward, for all of them are alike.

Legend: T tokens, J rows read per token, D hidden size, F inner width of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.select import select_kernels
from megamem.banks.bank import Bank, TableLookup
from megamem.chunk.inputs import Inputs
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.initialisation.distributions import Normal
from megamem.initialisation.initialise import distribution_of, table_std
from megamem.initialisation.random_fill import fill, normal_rows
from megamem.layers.layer import MemoryLayer, ScoreCalibration
from megamem.placement.sharing import BankSpec

# Rows that are read per layer, whose number decides how far a measured variance scatters, and the bounds on the tokens
# that read them.
_SAMPLE_READS = 1 << 13
_FEWEST_TOKENS, _MOST_TOKENS = 24, 1024
# The sample of a feed-forward.
_FFN_UNITS, _FFN_TOKENS = 512, 256


@dataclass(frozen=True)
class InitialOutput:
    """One memory layer at initialisation.

    Attributes:
        block: number of its block.
        calibration: statistics of its scores; None where it calibrates nothing.
        table_std: standard deviation of the elements of its tables (sigma_V).
        predicted_std: standard deviation of its output, by its family's formula; None where there is none.
        measured_std: standard deviation of its output over the sample.
        ffn_std: measured standard deviation of the output of the dense feed-forward beside it; None where there is
            none.
        num_tokens: tokens of the sample.
    """

    block: int
    calibration: ScoreCalibration | None
    table_std: float
    predicted_std: float | None
    measured_std: float
    ffn_std: float | None
    num_tokens: int


def measure_initial_outputs(model: ModelConfig, *, seed: int, most_layers: int) -> list[InitialOutput]:
    """Build and measure memory layers one after the other.

    sigma_V is that of the measured layer's own sigma_s. In a run the layers that share a bank agree on one, from the
    mean square of theirs. If there are more than `most_layers`, so many are measured, evenly spread from the first to
    the last.
    """
    layers = model.memory_layers
    return [_measure(model, layers[index].memory, index, seed) for index in spread(len(layers), most_layers)]


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` of range(count), evenly spread from the first to the last; of one, the middle."""
    if count <= most:
        return range(count)
    if most == 1:
        return [count // 2]
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


@torch.no_grad()
def _measure(model: ModelConfig, memory: MemoryConfig, index: int, seed: int) -> InitialOutput:
    tables = _DrawnTables(memory, model.memory_plan.views[index].bank, seed)
    layer, calibration = initialised_layer(model, memory, index, tables, seed)
    tables.std = table_std(model, memory, [calibration.sigma_s] if calibration is not None else [])
    num_tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, _SAMPLE_READS // memory.lookup.rows))
    tokens = sample_tokens(num_tokens, model.hidden_size, seed, layer.name)
    # Hidden states that were drawn belong to no tokens: layers that ask for ids get different ones.
    ids = torch.arange(num_tokens).unsqueeze(1) % (model.vocab_size or num_tokens)
    placed = model.memory_layers[index]
    slot = placed.slot
    if slot.reads_streams and model.num_streams is not None:
        tokens = tokens.unsqueeze(2).expand(-1, -1, model.num_streams, -1)
    is_beside_dense_ffn = model.moe is None and slot.has_ffn and not slot.is_in_attention
    return InitialOutput(
        block=placed.span.read,
        calibration=calibration,
        table_std=tables.std,
        predicted_std=layer.predicted_std(model, tables.std, calibration, seed),
        measured_std=_root_mean_square(layer.initial_output(tokens, Inputs(torch.stack((ids, torch.zeros_like(ids)))))),
        ffn_std=_measure_ffn(model, placed.span.read, seed=seed) if is_beside_dense_ffn else None,
        num_tokens=num_tokens,
    )


@torch.no_grad()
def _measure_ffn(model: ModelConfig, block: int, *, seed: int) -> float:
    """Standard deviation of a block's SwiGLU output: F / units times the variance from its first inner units."""
    inner, width = model.ffn_hidden_size, model.hidden_size
    units = min(inner, _FFN_UNITS)
    name = f"decoder.layers.{block}.mlp.ffn"

    def draw(part: str, shape: tuple[int, int], global_shape: tuple[int, int], first_row: int = 0) -> Tensor:
        weight, whole = torch.empty(shape), f"{name}.{part}.weight"
        distribution = distribution_of(whole, model)
        assert distribution is not None
        fill(weight, distribution, seed=seed, name=whole, global_shape=global_shape, offset=(first_row, 0))
        return weight

    gate, up = (draw("linear_fc1", (units, width), (2 * inner, width), first) for first in (0, inner))
    down = draw("linear_fc2", (width, units), (width, inner))
    tokens = sample_tokens(_FFN_TOKENS, width, seed, name).squeeze(1)
    out = F.linear(F.silu(F.linear(tokens, gate)) * F.linear(tokens, up), down)
    return math.sqrt(inner / units) * _root_mean_square(out)


def _root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def build_layer(model: ModelConfig, memory: MemoryConfig, index: int, tables: TableLookup, seed: int) -> MemoryLayer:
    """A memory layer of a model by itself, whole and with unset weights."""
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        layernorm_epsilon=model.norm_epsilon,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    return family_of(memory).layer()(
        config,
        memory,
        model.memory_plan.views[index],
        tables,
        kernels=select_kernels("torch"),
        name=model.memory_name(index),
        seed=seed,
        num_streams=model.num_streams,
    )


@torch.no_grad()
def initialised_layer(
    model: ModelConfig,
    memory: MemoryConfig,
    index: int,
    tables: TableLookup,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[MemoryLayer, ScoreCalibration | None]:
    """A memory layer by itself with the weights that a run with this seed gives it, and what it calibrated."""
    layer = build_layer(model, memory, index, tables, seed)
    for name, parameter in layer.named_parameters():
        if (distribution := distribution_of(f"{layer.name}.{name}", model)) is not None:
            fill(parameter, distribution, seed=seed, name=f"{layer.name}.{name}")
    layer.to(dtype)
    return layer, layer.calibrate(seed)


def sample_tokens(count: int, width: int, seed: int, name: str) -> Tensor:
    """[count, 1, width], of mean square 1 per token."""
    tokens = torch.empty(count, width)
    fill(tokens, Normal(1.0), seed=seed, name=f"{name}.measured_on")
    return (tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True))).unsqueeze(1)


class _DrawnTables:
    """A lookup that draws the rows it is asked for, as a bank's tables hold them.

    Attributes:
        std: standard deviation of their elements; set before a layer reads.
    """

    std: float

    def __init__(self, memory: MemoryConfig, bank: int, seed: int) -> None:
        self.memory, self.bank, self.seed = memory, bank, seed

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        bins: Tensor | None = None,
        num_bins: int = 1,
        **names: str,
    ) -> Tensor:
        """See `TableLookup.read`."""
        wanted, places = rows.unique(return_inverse=True)
        bank = Bank(
            BankSpec(self.bank, len(wanted), ()),
            self.memory,
            select_kernels("naive"),
            dtype=torch.float32,
            device="cpu",
            replica_rank=0,
        )
        for name, table in bank.named_parameters():
            whole = f"banks.{self.bank}.{name}"
            table.copy_(normal_rows(wanted, seed=self.seed, name=whole, std=self.std, width=table.shape[1]))
        return bank.read(places, scores, pre_input, bins, num_bins, **names)

    def read_heads(self, rows: Tensor, scores: Tensor, tensor_group: ProcessGroup | None) -> Tensor:
        """See `TableLookup.read_heads`."""
        assert tensor_group is None
        return self.read(rows, scores, None)
