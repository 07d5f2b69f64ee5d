"""A whole model against what the released code computed: logits, loss, residual streams, and every gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megamem.block import FfnWithMemory
from megamem.config import MemoryConfig, ModelConfig, PlacementConfig, SharingConfig
from megamem.model import MemoryGPTModel
from megamem.released_names import from_released
from parallel.cpu import cuda_on_cpu
from parallel.groups import ParallelSizes, initialise_groups
from pretrain.build import build_chunks
from pretrain.config.schema import RunConfig, TrainConfig

CASES = ("e2e_v2_perrank_full", "e2e_memory_plus")
# Largest error over the largest element of the reference: of what forward computes, and of gradients. Backward through four blocks makes
# one rounding about 500 times larger, in either precision.
TOLERANCE = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}


def run_config(released: dict[str, Any]) -> RunConfig:
    """Our config of the case's."""
    return RunConfig(
        model=ModelConfig(
            num_layers=released["n_layers"],
            hidden_size=released["d_model"],
            num_attention_heads=released["n_heads"],
            # The released width is that of up and gate together.
            ffn_hidden_size=released["mlp_hidden_size"] // 2,
            vocab_size_multiple=released["embedding_size"],
            tied_embeddings=released["weight_tying"],
            memory=memory_config(released),
        ),
        train=TrainConfig(sequence_length=released["max_sequence_length"]),
    )


def memory_config(released: dict[str, Any]) -> MemoryConfig:
    plan = released["mem_insert_way"]
    common: dict[str, Any] = {
        "num_keys": released["mem_knum"],
        "key_dim": released["mem_kdim"],
        "value_dim": released["mem_vdim"],
        "top_k": released["mem_knn"],
        "num_heads": released["mem_head"],
        "placement": PlacementConfig(spans=None if plan == "full" else plan),
    }
    if released["mem_type"] == "memory_plus":
        return MemoryConfig(kind="memory_plus", sharing=SharingConfig("all"), **common)
    window = round(released["mem_share_ratio"] * released["n_layers"])
    return MemoryConfig(
        pre_value_dim=released["mem_pre_vdim"],
        shuffle="table",
        sharing=SharingConfig("ring", window, window="released"),
        **common,
    )


def load(model: MemoryGPTModel, weights: dict[str, Tensor]) -> None:
    targets: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(weights) == set(targets)
    with torch.no_grad():
        for name, target in targets.items():
            assert target.shape == weights[name].shape, name
            target.copy_(weights[name])


def capture_streams(model: MemoryGPTModel) -> dict[str, Tensor]:
    """Fill a dictionary, during the next forward, with what the case calls block_in, block_out, mem_in and mem_out; all [b, s, D]."""
    streams: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        streams[name] = value.detach().transpose(0, 1)

    memories = 0
    for index, layer in enumerate(model.decoder.layers):
        number = memories if isinstance(layer.mlp, FfnWithMemory) else None

        def before(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
            keep(f"block_in.{index}", kwargs["hidden_states"])

        def memory(_: Any, args: Any, out: Tensor, number: int | None = number) -> None:
            keep(f"mem_in.{number}", args[0])
            keep(f"mem_out.{number}", out)

        def after(_: Any, args: Any, out: Any, index: int = index, number: int | None = number) -> None:
            keep(f"block_out.{index}", out[0])
            if number is not None:
                # The release adds the memory's output after its block; here it is part of it.
                streams[f"block_out.{index}"] = streams[f"block_out.{index}"] - streams[f"mem_out.{number}"]

        layer.register_forward_pre_hook(before, with_kwargs=True)
        if number is not None:
            layer.mlp.memory.register_forward_hook(memory)
            memories += 1
        layer.register_forward_hook(after)
    return streams


def errors_of(tensors: dict[str, Tensor], released: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Build, load, run forward and backward, and compare everything that was recorded."""
    config = run_config(released)
    with cuda_on_cpu():
        groups = initialise_groups(ParallelSizes(), device=torch.device("cpu"), timeout_minutes=1, seed=1)
        (model,) = build_chunks(config, groups, vocab_size=released["vocab_size"], dtype=dtype)
        recorded = {
            name.removeprefix(prefix): t
            for name, t in tensors.items()
            for prefix in ("param.", "buffer.")
            if name.startswith(prefix)
        }
        load(model, from_released(recorded, config.model))
        # Megatron computes the frequencies in fp32 whatever the model's dtype.
        rope, width = model.rotary_pos_emb, config.model.attention_head_dim
        rope.inv_freq = config.model.rotary_base ** -(torch.arange(0, width, 2, dtype=dtype) / width)
        streams = capture_streams(model)
        ids = tensors["input_ids"]
        batch, length = ids.shape
        logits = model(ids, torch.arange(length).expand(batch, -1), None)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / ids.numel()
        loss.backward()
    actual = {"logits": logits, "loss": loss, **streams}
    errors = {name: relative_error(value, tensors[name]) for name, value in actual.items()}
    gradients = from_released(
        {name.removeprefix("grad."): t for name, t in tensors.items() if name.startswith("grad.")}, config.model
    )
    parameters = dict(model.named_parameters())
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        errors[f"grad {name}"] = relative_error(parameter.grad, gradients[name])
    return errors


def relative_error(actual: Tensor, reference: Tensor) -> float:
    assert actual.shape == reference.shape
    actual, reference = actual.detach().double(), reference.double()
    return float((actual - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_what_the_release_computes(
    golden_dir: Path, run_ranks: Any, case: str, dtype: torch.dtype, record_property: Any
) -> None:
    released = json.loads((golden_dir / f"{case}.json").read_text())["config"]
    tensors = load_file(golden_dir / f"{case}.safetensors")
    (errors,) = run_ranks(lambda: errors_of(tensors, released, dtype), 1)
    expected = {name for name in tensors if not name.startswith(("param.", "buffer.", "grad.", "input_ids"))}
    assert {name for name in errors if not name.startswith("grad ")} == expected
    record_property("worst_error", max(errors.values()))
    forward, backward = TOLERANCE[dtype]
    too_large = {name: e for name, e in errors.items() if not e <= (backward if name.startswith("grad ") else forward)}
    assert not too_large
