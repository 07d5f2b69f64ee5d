"""Common parts of comparisons with recorded memories: reading a case, the product's layers for it, attention of the
recorded blocks by PyTorch's operations, and errors.

Legend: b sequences, s tokens, d head dimension, n query heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from kernels.select import select_kernels
from megamem.banks.bank import Bank
from megamem.config.memory import MemoryConfig
from megamem.families.registry import family_of

# Largest error over the largest element of the reference: of outputs, and of gradients.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (5e-6, 2e-5)}


class OneRank:
    """A group of one rank, for modules that ask."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def read_case(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a recorded case."""
    config: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["config"]
    return config, load_file(folder / f"{name}.safetensors")


def recorded_weights(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The recorded weights and inputs that gradients are taken of, by name."""
    return {
        name.removeprefix("param."): tensor.to(dtype).requires_grad_()
        for name, tensor in tensors.items()
        if name.startswith("param.")
    }


def megatron(config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration for `d` columns and `H` heads."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=config["d"],
        num_attention_heads=config["H"],
        layernorm_epsilon=1e-5,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )


def build_memory(
    memory: MemoryConfig,
    config: TransformerConfig,
    num_layers: int = 1,
    kernels: Literal["auto", "naive"] = "auto",
) -> tuple[list[Any], list[Bank]]:
    """The product's layers of a memory, and the banks that they read, with weights that are not set."""
    plan, ops = memory.plan(num_layers), select_kernels(kernels, device_type="cpu")
    banks = [Bank(spec, memory, ops, dtype=config.params_dtype, device="cpu", replica_rank=0) for spec in plan.banks]
    make_layer = family_of(memory).layer()
    layers = [
        make_layer(config, memory, view, banks[view.bank], kernels=ops, name=f"layers.{index}", seed=1)
        for index, view in enumerate(plan.views)
    ]
    return layers, banks


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """The largest error over the largest element of the reference; of a reference of zeros the largest element."""
    assert actual.shape == reference.shape
    error, size = (actual.detach().double() - reference.double()).abs().max(), reference.double().abs().max()
    return float(error / size) if size > 0 else float(error)


def check(out: Tensor, gradients: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> None:
    """An output, and gradients in the recorded layouts, which are to be those of everything that is recorded."""
    of_output, of_gradient = TOLERANCE[out.dtype]
    assert {f"grad.{name}" for name in gradients} == {name for name in tensors if name.startswith("grad.")}
    errors = {"out": relative_error(out, tensors["out"]) / of_output}
    for name, gradient in gradients.items():
        assert gradient is not None, name
        errors[name] = relative_error(gradient, tensors[f"grad.{name}"]) / of_gradient
    assert max(errors.values()) <= 1, {name: error for name, error in errors.items() if error > 1}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, heads, s, d] of [b, s, heads d]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, apart: Tensor | None = None) -> Tensor:
    """Causal softmax attention of [b, n, s, d], grouped queries beside their key/value head, as [b, s, n d]; tokens that are
    `apart` [b, s, s] do not see each other.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
    if apart is not None:
        future = future | apart.unsqueeze(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)


def rms_normalise(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions of [b, n, s, d], halves together."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta ** -(torch.arange(half) / half).double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
