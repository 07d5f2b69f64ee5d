"""The record of Engram."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.config.width import Width
from megamem.families.family import Family
from megamem.initialisation.distributions import Constant, Distribution, Normal
from megamem.layers.costs import LayerCosts
from megamem.placement.sharing import LayerView

from .config import EngramConfig
from .released import released_module


def _costs(memory: EngramConfig, view: LayerView, model: ModelConfig) -> LayerCosts:
    """Key and value projections, 2 E D and their biases, two gains, and the convolution's taps with a gain; of n streams all
    but the value projection n times.

    The score of a token is as many operations as a tap. Backward needs keys, streams and values, the gated value and what
    the convolution reads; of fp32, both factors of the score, values, and the convolution's output, behind which SiLU is.
    """
    hidden, n = model.hidden_size, model.num_streams or 1
    width = n * hidden
    taps = memory.conv_kernel
    keys, values = memory.memory_width * width, memory.memory_width * hidden
    convolution = (taps + 1) * width if taps else 0
    return LayerCosts(
        retrieval=keys + width * memory.projection_biases + 2 * width + convolution,
        projections=values + hidden * memory.projection_biases,
        key_flops=2.0 * keys,
        projection_flops=2.0 * values,
        selection_flops=2.0 * (1 + taps) * width,
        kept_narrow=2 * width + hidden + (2 * width if taps else 0),
        kept_wide=2 * width + hidden + (width if taps else 0),
        halo_tokens=memory.reach,
        matrices=((width, memory.memory_width), (hidden, memory.memory_width)),
    )


def _distribution(name: str, memory: EngramConfig, model: ModelConfig) -> Distribution | None:
    match name:
        case "key_proj" | "value_proj":
            return Normal(model.narrow_std)
        case "query_gain":
            return Constant(model.width_rules.gain(Width.SCORES))
        case "key_gain" | "conv_gain":
            return Constant(1.0)
        case "key_bias" | "value_bias" | "conv":
            # The layer begins as its gated values alone.
            return Constant(0.0)
        case "multipliers" | "token_map":
            return None
    raise AssertionError(f"no initial distribution is defined for the memory's {name}")


def _table_std(memory: EngramConfig, model: ModelConfig, sigma_s: float | None) -> float:
    """Standard deviation of the embedding, whose rows they are, too."""
    return model.narrow_std


ENGRAM = Family(
    config=EngramConfig,
    layer_path=f"{__package__}.layer:EngramLayer",
    costs=_costs,
    distribution=_distribution,
    table_std=_table_std,
    released_module=released_module,
)
