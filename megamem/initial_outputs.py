"""What single memory layers put out at initialisation: predicted and measured, without building a model or filling a table.

A layer is built on its own, with the weights that a run with this seed gives it, and reads random tokens of mean square 1, as a norm
delivers them. The rows that they hit are drawn by the tables' own generator, so the figures are those of the run's own tables.

Legend: T tokens, J rows read per token, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import select_kernels
from megamem.bank import Bank
from megamem.calibration import ScoreCalibration, calibrate_scores
from megamem.config import MemoryConfig, ModelConfig
from megamem.initial_variance import memory_variance
from megamem.initialisation import initialise_layer, table_std
from megamem.layers.layer import MemoryLayer
from megamem.layers.registry import layer_class
from megamem.layers.ultramem_v2 import UltraMemV2Layer
from megamem.random_fill import fill_normal, normal_rows
from megamem.sharing import BankSpec, plan_sharing

# Table elements that are drawn per layer, and the bounds that they put on the sample.
_SAMPLE_ELEMENTS = 1 << 22
_FEWEST_TOKENS, _MOST_TOKENS = 16, 128


@dataclass(frozen=True)
class InitialOutput:
    """One memory layer at initialisation.

    Attributes:
        block: that it belongs to.
        calibration: of its scores; None where its gains are constants.
        table_std: sigma_V, of its values and pre-values.
        predicted_std: of its output, by Eq. 22; None with product keys, whose softmaxed scores it does not describe.
        measured_std: over the sample.
        num_tokens: the sample.
    """

    block: int
    calibration: ScoreCalibration | None
    table_std: float
    predicted_std: float | None
    measured_std: float
    num_tokens: int


@torch.no_grad()
def measure_initial_outputs(model: ModelConfig, *, seed: int, most_layers: int) -> list[InitialOutput]:
    """Build and measure memory layers one after the other.

    sigma_V is that of the measured layer's own sigma_s. In a run the layers that share a bank agree on one, from the mean square of theirs.

    Args:
        model: with a memory.
        seed: the run's seed.
        most_layers: of a deeper model, so many layers are measured, evenly spread from the first to the last.
    """
    return [_measure(model, index, seed) for index in spread(len(model.memory_spans), most_layers)]


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` of range(count), evenly spread, the first and the last among them; the middle one if it is to be one."""
    if count <= most:
        return range(count)
    if most == 1:
        return [count // 2]
    return [round(step * (count - 1) / (most - 1)) for step in range(most)]


def _measure(model: ModelConfig, index: int, seed: int) -> InitialOutput:
    memory = model.memory
    assert memory is not None
    tables = _DrawnTables(memory, seed)
    layer = _build_layer(model, memory, index, tables, seed)
    calibration = initialise_layer(layer, model, seed=seed)
    tables.std = table_std(model, memory, [calibration.sigma_s] if calibration is not None else [])
    per_token = memory.num_heads * memory.top_k * (memory.value_dim + memory.pre_dim)
    num_tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, _SAMPLE_ELEMENTS // per_token))
    out = layer(sample_tokens(num_tokens, model.hidden_size, seed, layer.name))
    predicted = _predicted_std(layer, model, tables.std, seed) if isinstance(layer, UltraMemV2Layer) else None
    return InitialOutput(
        block=model.memory_spans[index].read,
        calibration=calibration,
        table_std=tables.std,
        predicted_std=predicted,
        measured_std=float(out.double().square().mean().sqrt()),
        num_tokens=num_tokens,
    )


def _predicted_std(layer: UltraMemV2Layer, model: ModelConfig, sigma_v: float, seed: int) -> float:
    """Eq. 22 with the layer's own gains and projections, so that it covers the release's constants too.

    A score is a product of a row and a column score, and each of those of a query and a key: it grows with the square of both gains.
    """
    memory = layer.memory
    calibration = calibrate_scores(memory, layer.num_keys, layer.cores, seed=seed, name=layer.name)
    mean_score = float(layer.query_norm.mean() * layer.keys_norm.mean()) ** 2 / calibration.gain**4
    pre = layer.pre_value_proj
    return math.sqrt(
        memory_variance(
            model,
            memory,
            sigma_v=sigma_v,
            score_square=mean_score**2 * (1 + calibration.sigma_s**2),
            pre_input_variance=0.0 if pre is None else model.hidden_size * float(pre.square().mean()),
            value_proj_variance=float(layer.value_proj.square().mean()),
        )
    )


def _build_layer(model: ModelConfig, memory: MemoryConfig, index: int, tables: _DrawnTables, seed: int) -> MemoryLayer:
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        layernorm_epsilon=model.norm_epsilon,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    plan = plan_sharing(memory, model.num_memory_layers)
    view = plan.views[index]
    tables.bank = view.bank
    return layer_class(memory.kind)(
        config,
        memory,
        view,
        tables,
        kernels=select_kernels("torch"),
        num_bank_rows=plan.banks[view.bank].num_rows,
        name=f"decoder.layers.{model.memory_spans[index].read}.mlp.memory",
        seed=seed,
    )


def sample_tokens(count: int, width: int, seed: int, name: str) -> Tensor:
    """[count, 1, width], of mean square 1 per token."""
    tokens = torch.empty(count, width)
    fill_normal(
        tokens, seed=seed, name=f"{name}.measured_on", std=1.0, global_shape=tokens.shape, offset=(0,) * tokens.dim()
    )
    return (tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True))).unsqueeze(1)


class _DrawnTables:
    """A lookup that draws the rows it is asked for, as the bank's tables hold them.

    Attributes:
        bank: whose tables.
        std: of their elements.
    """

    def __init__(self, memory: MemoryConfig, seed: int) -> None:
        self.memory, self.seed = memory, seed
        self.bank = 0
        self.std = 1.0

    def read(
        self,
        rows: Tensor,
        scores: Tensor,
        pre_input: Tensor | None,
        block: Tensor | None = None,
        num_blocks: int = 1,
    ) -> Tensor:
        """See `TableLookup.read`."""
        wanted, places = rows.unique(return_inverse=True)
        spec = BankSpec(self.bank, len(wanted), ())
        part = Bank(spec, self.memory, select_kernels("naive"), dtype=torch.float32, device="cpu", replica_rank=0)
        for name, table in part.named_parameters():
            name = f"banks.{self.bank}.{name}"
            table.copy_(normal_rows(wanted, seed=self.seed, name=name, std=self.std, width=table.shape[1]))
        return part.read(places, scores, pre_input, block, num_blocks)
