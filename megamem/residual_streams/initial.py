"""Initial weights of sites and of the end."""

from __future__ import annotations

from megamem.config.model import ModelConfig
from megamem.config.width import Width
from megamem.initialisation.distributions import Constant, Distribution, Normal

from .config import ResidualStreamsConfig

_SCALE_OF_MAPS = 0.01
"""Factor of dynamic weights in hyper-connections."""


def distribution(
    own_name: str, settings: ResidualStreamsConfig, model: ModelConfig, *, is_end: bool
) -> Distribution | None:
    """Initial distribution of a parameter of a site, or of the end; None: `StreamSite.set_initial` sets it."""
    match settings.kind, own_name:
        case "gated", "norm":
            # Gains less 1; those of the end are the last before logits.
            return Constant(model.width_rules.gain(Width.LOGITS) - 1 if is_end else 0.0)
        case ("mhc" | "single_pass", "fn") | ("gated", "down" | "inject"):
            return Normal(model.linear_std)
        case "gated", "up":
            return Normal(model.narrow_std)
        case ("mhc" | "single_pass", "scale") | ("plain", "static_beta" | "norm_gain"):
            return Constant(1.0)
        case ("mhc" | "single_pass", "base") | ("plain", "alpha_map" | "beta_map" | "norm_bias"):
            return Constant(0.0)
        case "plain", "alpha_scale" | "beta_scale":
            return Constant(_SCALE_OF_MAPS)
        case "plain", "static_alpha":
            return None
    raise AssertionError(f"no initial distribution is defined for {own_name} of {settings.kind} streams")
