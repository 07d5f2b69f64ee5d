"""Latent attention: recorded tensors, Megatron's own module, a plain transformer that is written out here, and other
layouts.

Legend: b sequences, s tokens, n heads, d width of a head, C width of a latent, r of a rotary key, M slots of a token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from safetensors.torch import load_file
from tiny_runs import VOCAB_SIZE, joined
from torch import Tensor

from megamem.attention import SdpaCoreAttention
from megamem.config import LatentAttentionConfig, ModelConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.move.config import MoveConfig
from megamem.inputs import Inputs
from megamem.memory_config import MemoryConfig
from megamem.model import MemoryGPTModel
from megamem.norm import RMSNorm
from parallel.groups import ParallelGroups
from pretrain.build import build_chunks
from pretrain.config.schema import RunConfig, TrainConfig

# Largest error over the largest element of the reference: of outputs, and of gradients.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (5e-6, 2e-5)}
LENGTH = 12
RECORDED = ("mla_move_keys_mixed", "mla_lave_ungated")
# The recorded ones: weights there are [in, out].
PROJECTIONS = {"WQ": "query_proj", "WDKV": "latent_proj", "WO": "linear_proj"}


def chunk_of(model: ModelConfig, groups: ParallelGroups, dtype: torch.dtype, vocab_size: int) -> MemoryGPTModel:
    config = RunConfig(model=model, train=TrainConfig(sequence_length=LENGTH))
    (chunk,) = build_chunks(config, groups, vocab_size=vocab_size, dtype=dtype)
    return chunk


def recorded_model(name: str, case: dict[str, Any]) -> ModelConfig:
    common: dict[str, Any] = {
        "vocab_size": case["vocab"],
        "value_dim": case["d_c"],
        "num_gate_heads": case["Hkv"],
        "gated_standard_path": case["gated_standard_path"],
        "mixed_into": "latents",
    }
    memory = LaveConfig(**common) if "lave" in name else MoveConfig(num_slots=case["M"], **common)
    return ModelConfig(
        num_layers=1,
        hidden_size=case["d"],
        num_attention_heads=case["H"],
        head_dim=case["dh"],
        ffn_hidden_size=8,
        qk_norm=False,
        latent_attention=LatentAttentionConfig(latent_dim=case["d_c"], rotary_dim=0),
        memory=memory,
    )


def relative_error(actual: Tensor, reference: Tensor) -> float:
    assert actual.shape == reference.shape
    return float((actual.detach().double() - reference.double()).abs().max() / reference.double().abs().max())


def up_projection(of_keys: Tensor, of_values: Tensor, heads: int) -> Tensor:
    """Megatron's one up-projection [n (d + d), C] of the two recorded ones [C, n d]."""
    return torch.cat([x.T.unflatten(0, (heads, -1)) for x in (of_keys, of_values)], 1).flatten(0, 1)


def errors_of(chunk: MemoryGPTModel, tensors: dict[str, Tensor], heads: int) -> dict[str, float]:
    """Relative errors of the first block's attention, of its output and of every gradient."""
    attention: Any = chunk.decoder.layers[0].self_attention
    dtype = attention.query_proj.weight.dtype
    given = {name: x.to(dtype) for name, x in tensors.items() if name.startswith("param.")}
    table, memory = chunk.banks["0"].get_parameter("values"), attention.memory
    with torch.no_grad():
        for name, own in PROJECTIONS.items():
            getattr(attention, own).weight.copy_(given[f"param.{name}"].T)
        attention.key_value_proj.weight.copy_(up_projection(given["param.WUK"], given["param.WUV"], heads))
        memory.gate_proj.copy_(given["param.WG"].T)
        table.copy_(given["param.E"].flatten(0, 1))
    x = given["param.x"].clone().requires_grad_()
    ids = tensors["in.tokens"].T
    out, bias = attention(x.transpose(0, 1), None, attention_bias=Inputs(torch.stack((ids, torch.zeros_like(ids)))))
    assert bias is None
    out = out.transpose(0, 1)
    (out * tensors["r"].to(dtype)).sum().backward()
    gradients = {f"grad.{name}": getattr(attention, own).weight.grad.T for name, own in PROJECTIONS.items()}
    of_up = attention.key_value_proj.weight.grad.unflatten(0, (heads, 2, -1))
    gradients |= {f"grad.{name}": of_up[:, part].flatten(0, 1).T for part, name in enumerate(("WUK", "WUV"))}
    gradients |= {"grad.WG": memory.gate_proj.grad.T, "grad.x": x.grad, "grad.E": table.grad.view_as(given["param.E"])}
    assert set(gradients) == {name for name in tensors if name.startswith("grad.")}
    return {"out": relative_error(out, tensors["out"])} | {
        name: relative_error(gradient, tensors[name]) for name, gradient in gradients.items()
    }


@pytest.mark.parametrize("name", RECORDED)
def test_latents_are_mixed_as_recorded(run_ranks: Any, golden_dir: Path, name: str) -> None:
    case = json.loads((golden_dir / "token" / f"{name}.json").read_text(encoding="utf-8"))["config"]
    tensors = load_file(golden_dir / "token" / f"{name}.safetensors")
    model = recorded_model(name, case)

    def main() -> dict[torch.dtype, dict[str, float]]:
        with joined(RunConfig(model=model)) as groups:
            return {
                dtype: errors_of(chunk_of(model, groups, dtype, case["vocab"]), tensors, case["H"])
                for dtype in TOLERANCE
            }

    for dtype, errors in run_ranks(main, 1)[0].items():
        of_output, of_gradient = TOLERANCE[dtype]
        assert errors.pop("out") <= of_output
        assert max(errors.values()) <= of_gradient, errors
