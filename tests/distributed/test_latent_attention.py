"""Latent attention: recorded tensors, Megatron's own module, a plain transformer that is written out here, and other
layouts.

Legend: b sequences, s tokens, n heads, d width of a head, C width of a latent, r of a rotary key, M slots of a token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tiny_runs import VOCAB_SIZE, joined
from torch import Tensor

from megamem.attention.core import SdpaCoreAttention
from megamem.attention.rotary import rotary_turns
from megamem.backbone.norm import RMSNorm
from megamem.chunk.inputs import Inputs
from megamem.config.model import LatentAttentionConfig, ModelConfig
from megamem.families.lave.config import LaveConfig
from megamem.families.move.config import MoveConfig
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks
from tests.golden import TOLERANCE, read_case, relative_error

LENGTH = 12
RECORDED = ("mla_move_keys_mixed", "mla_lave_ungated")
# The recorded ones: weights there are [in, out].
PROJECTIONS = {"WQ": "linear_q_proj", "WDKV": "linear_kv_down_proj", "WO": "linear_proj"}


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


def up_projection(of_keys: Tensor, of_values: Tensor, heads: int) -> Tensor:
    """Megatron's one up-projection [n (d + d), C] of the two recorded ones [C, n d]."""
    return torch.cat([x.T.unflatten(0, (heads, -1)) for x in (of_keys, of_values)], 1).flatten(0, 1)


def set_recorded(chunk: MemoryGPTModel, tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Set the recorded weights; returns them and the input in the dtype of the model."""
    attention: Any = chunk.decoder.layers[0].self_attention
    dtype = attention.linear_q_proj.weight.dtype
    given = {name: x.to(dtype) for name, x in tensors.items() if name.startswith("param.")}
    table, memory = chunk.banks["0"].get_parameter("values"), attention.memory
    with torch.no_grad():
        for name, own in PROJECTIONS.items():
            getattr(attention, own).weight.copy_(given[f"param.{name}"].T)
        attention.linear_kv_up_proj.weight.copy_(up_projection(given["param.WUK"], given["param.WUV"], heads))
        memory.gate_proj.copy_(given["param.WG"].T)
        table.copy_(given["param.E"].flatten(0, 1))
    return given


def errors_of(chunk: MemoryGPTModel, tensors: dict[str, Tensor], heads: int) -> dict[str, float]:
    """Relative errors of the first block's attention, of its output and of every gradient."""
    attention: Any = chunk.decoder.layers[0].self_attention
    given = set_recorded(chunk, tensors, heads)
    dtype, table, memory = given["param.x"].dtype, chunk.banks["0"].get_parameter("values"), attention.memory
    x = given["param.x"].clone().requires_grad_()
    ids = tensors["in.tokens"].T
    out, bias = attention(x.transpose(0, 1), None, attention_bias=Inputs(torch.stack((ids, torch.zeros_like(ids)))))
    assert bias is None
    out = out.transpose(0, 1)
    (out * tensors["r"].to(dtype)).sum().backward()
    gradients = {f"grad.{name}": getattr(attention, own).weight.grad.T for name, own in PROJECTIONS.items()}
    of_up = attention.linear_kv_up_proj.weight.grad.unflatten(0, (heads, 2, -1))
    gradients |= {f"grad.{name}": of_up[:, part].flatten(0, 1).T for part, name in enumerate(("WUK", "WUV"))}
    gradients |= {"grad.WG": memory.gate_proj.grad.T, "grad.x": x.grad, "grad.E": table.grad.view_as(given["param.E"])}
    assert set(gradients) == {name for name in tensors if name.startswith("grad.")}
    return {"out": relative_error(out, tensors["out"])} | {
        name: relative_error(gradient, tensors[name]) for name, gradient in gradients.items()
    }


@pytest.mark.parametrize("name", RECORDED)
def test_latents_are_mixed_as_recorded(run_ranks: Any, golden_dir: Path, name: str) -> None:
    case, tensors = read_case(golden_dir / "token", name)
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


def decoded(chunk: MemoryGPTModel, tensors: dict[str, Tensor], heads: int) -> Tensor:
    """[b, s, D], token by token, with nothing kept of earlier ones but their mixed latents, and no key or value made."""
    attention: Any = chunk.decoder.layers[0].self_attention
    x, ids = tensors["param.x"].transpose(0, 1), tensors["in.tokens"].T
    of_keys, of_values = attention.linear_kv_up_proj.weight.unflatten(0, (heads, 2, -1)).unbind(1)
    cache, out = x.new_empty(0, x.shape[1], of_keys.shape[2]), []
    for token in range(len(x)):
        now, inputs = x[token : token + 1], torch.stack((ids[token : token + 1],) * 2)
        latents = attention.kv_layernorm(attention.linear_kv_down_proj(now)[0])
        mixed, same = attention.latents(latents, Inputs(inputs), now)
        assert mixed is same
        cache = torch.cat((cache, mixed))
        queries = attention.linear_q_proj(now)[0].unflatten(2, (heads, -1))[0]
        absorbed = torch.einsum("bnd,ndc->bnc", queries, of_keys)
        shares = (torch.einsum("bnc,sbc->bns", absorbed, cache) / queries.shape[2] ** 0.5).softmax(2)
        values = torch.einsum("bns,sbc,ndc->bnd", shares, cache, of_values)
        out.append(attention.linear_proj(values.flatten(1).unsqueeze(0))[0][0])
    return torch.stack(out, 1)


@pytest.mark.parametrize("name", RECORDED)
def test_a_cache_of_mixed_latents_is_enough(run_ranks: Any, golden_dir: Path, name: str) -> None:
    case, tensors = read_case(golden_dir / "token", name)
    model = recorded_model(name, case)

    def main() -> Tensor:
        with joined(RunConfig(model=model)) as groups, torch.no_grad():
            chunk = chunk_of(model, groups, torch.float64, case["vocab"])
            set_recorded(chunk, tensors, case["H"])
            return decoded(chunk, tensors, case["H"])

    assert relative_error(run_ranks(main, 1)[0], tensors["decode.out"]) <= 1e-12


def turned(x: Tensor, base: float) -> Tensor:
    """Position m turns the pair (i, i + r/2) of [s, n, r] by the angle m base^(-2i/r)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normalised(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gain


def mixed(
    latents: Tensor, x: Tensor, ids: Tensor, weights: dict[str, Tensor], prefix: str, memory: MoveConfig
) -> Tensor:
    """[s, C], token by token and part by part (MoVE, Eq. 7)."""
    parts, num_gates = memory.num_gate_heads, memory.num_slots + memory.gated_standard_path
    gates = 2 * (x @ weights[f"{prefix}memory.gate_proj"].T).sigmoid().view(len(x), parts, num_gates)
    rows = weights["banks.0.values"].view(memory.vocab_size, memory.num_slots, parts, -1)
    out = latents.clone().view(len(x), parts, -1)
    for token, part in ((token, part) for token in range(len(x)) for part in range(parts)):
        gate = list(gates[token, part])
        if memory.gated_standard_path:
            out[token, part] *= gate.pop(0)
        for slot, weight in enumerate(gate):
            out[token, part] += weight * rows[ids[token], slot, part]
    return out.flatten(1)


def plain_logits(ids: Tensor, weights: dict[str, Tensor], model: ModelConfig) -> Tensor:
    """[s, rows of the embedding], of one sequence."""
    latent, heads, head = model.latent_attention, model.num_attention_heads, model.attention_head_dim
    assert latent is not None
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    h = weights["embedding.word_embeddings.weight"][ids]
    for layer in range(model.num_layers):
        block = f"decoder.layers.{layer}."
        own = f"{block}self_attention."
        x = normalised(h, weights[f"{block}input_layernorm.weight"], model.norm_epsilon)
        latents, shared = (x @ weights[f"{own}linear_kv_down_proj.weight"].T).split(
            [latent.latent_dim, latent.rotary_dim], 1
        )
        if model.qk_norm:
            latents = normalised(latents, weights[f"{own}kv_layernorm.weight"], model.norm_epsilon)
        of_keys = of_values = latents
        if isinstance(model.memory, MoveConfig):
            of_values = mixed(latents, x, ids, weights, own, model.memory)
            of_keys = of_values if model.memory.mixed_into == "latents" else latents
        up = weights[f"{own}linear_kv_up_proj.weight"].view(heads, 2 * head - latent.rotary_dim, -1)
        keys = torch.einsum("sc,hkc->shk", of_keys, up[:, : head - latent.rotary_dim])
        keys = torch.cat((keys, turned(shared.unsqueeze(1), model.rotary_base).expand(-1, heads, -1)), 2)
        values = torch.einsum("sc,hvc->shv", of_values, up[:, head - latent.rotary_dim :])
        if latent.query_latent_dim is None:
            queries = x @ weights[f"{own}linear_q_proj.weight"].T
        else:
            of_queries = x @ weights[f"{own}linear_q_down_proj.weight"].T
            if model.qk_norm:
                of_queries = normalised(of_queries, weights[f"{own}q_layernorm.weight"], model.norm_epsilon)
            queries = of_queries @ weights[f"{own}linear_q_up_proj.weight"].T
        queries = queries.view(len(ids), heads, head)
        plain, positional = queries.split([head - latent.rotary_dim, latent.rotary_dim], 2)
        queries = torch.cat((plain, turned(positional, model.rotary_base)), 2)
        scores = torch.einsum("shd,thd->hst", queries, keys) / head**0.5
        shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        h = h + torch.einsum("hst,thv->shv", shares, values).flatten(1) @ weights[f"{own}linear_proj.weight"].T
        x = normalised(h, weights[f"{block}pre_mlp_layernorm.weight"], model.norm_epsilon)
        gate, up = (x @ weights[f"{block}mlp.linear_fc1.weight"].T).chunk(2, 1)
        h = h + (gate * gate.sigmoid() * up) @ weights[f"{block}mlp.linear_fc2.weight"].T
    h = normalised(h, weights["decoder.final_layernorm.weight"], model.norm_epsilon)
    return h @ weights["embedding.word_embeddings.weight"].T


PLAIN = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    head_dim=10,
    ffn_hidden_size=20,
    vocab_size_multiple=16,
    latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=6),
)
COMPRESSED = replace(PLAIN, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=6, query_latent_dim=14))
MOVE = MoveConfig(num_slots=2, vocab_size=VOCAB_SIZE, value_dim=12, num_gate_heads=3, mixed_into="latents")
MODELS = {
    "latents": PLAIN,
    "no norm": replace(PLAIN, qk_norm=False),
    "of queries too": COMPRESSED,
    "of queries too, no norm": replace(COMPRESSED, qk_norm=False),
    "no positions": replace(PLAIN, latent_attention=LatentAttentionConfig(latent_dim=12, rotary_dim=0)),
    "another base": replace(PLAIN, rotary_base=50),
    "move": replace(PLAIN, memory=MOVE),
    "move for values alone": replace(PLAIN, memory=replace(MOVE, mixed_into="values", gated_standard_path=False)),
}


def fill(chunk: MemoryGPTModel) -> None:
    """Fill with weights so large that attention is uneven, and every gain and gate tells."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in chunk.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)


def test_logits_are_those_of_a_plain_transformer(run_ranks: Any) -> None:
    ids = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(4))

    def main() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        found = {}
        with joined(RunConfig(model=PLAIN)) as groups, torch.no_grad():
            for name, model in MODELS.items():
                chunk = chunk_of(model, groups, torch.float64, VOCAB_SIZE)
                fill(chunk)
                batch, places = ids.unsqueeze(0), torch.arange(LENGTH).unsqueeze(0)
                logits = chunk(batch, places, None)[0]
                weights = {key: value for key, value in chunk.state_dict().items() if isinstance(value, Tensor)}
                chunk.set_memory_enabled(False)
                found[name] = logits, plain_logits(ids, weights, model), chunk(batch, places, None)[0]
        return found

    found = run_ranks(main, 1)[0]
    for name, (logits, expected, without_memory) in found.items():
        # Megatron keeps rotary frequencies in fp32.
        assert relative_error(logits, expected) <= (1e-12 if name == "no positions" else 1e-6), name
        assert torch.equal(logits, without_memory) == (MODELS[name].memory is None), name


def megatrons(attention: Any, chunk: MemoryGPTModel) -> MLASelfAttention:
    """Megatron's own module with the weights of ours."""
    ours, latent = chunk.config, chunk.model_config.latent_attention
    assert latent is not None
    head = chunk.model_config.attention_head_dim
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_attention_heads,
        q_lora_rank=latent.query_latent_dim,
        kv_lora_rank=latent.latent_dim,
        qk_head_dim=head - latent.rotary_dim,
        qk_pos_emb_head_dim=latent.rotary_dim,
        v_head_dim=head,
        rope_type="rope",
        rotary_base=chunk.model_config.rotary_base,
        rotary_scaling_factor=1.0,
        layernorm_epsilon=ours.layernorm_epsilon,
        add_bias_linear=False,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    parts = replace(spec.submodules, core_attention=PlainCore, kv_layernorm=RMSNorm, q_layernorm=RMSNorm)
    theirs = MLASelfAttention(config, parts, layer_number=1, attn_mask_type=AttnMaskType.causal)
    turn = torch.cat((torch.arange(0, latent.rotary_dim, 2), torch.arange(1, latent.rotary_dim, 2))).argsort()
    plain = head - latent.rotary_dim
    makes_queries = "linear_q_proj" if latent.query_latent_dim is None else "linear_q_up_proj"
    queries = getattr(attention, makes_queries).weight.unflatten(0, (-1, head))
    compressed = attention.linear_kv_down_proj.weight
    with torch.no_grad():
        # It turns neighbouring columns, where ours turns those that are half a width apart.
        getattr(theirs, makes_queries).weight.copy_(
            torch.cat((queries[:, :plain], queries[:, plain:][:, turn]), 1).flatten(0, 1)
        )
        if latent.query_latent_dim is not None:
            theirs.linear_q_down_proj.weight.copy_(attention.linear_q_down_proj.weight)
            theirs.q_layernorm.weight.copy_(attention.q_layernorm.weight)
        theirs.linear_kv_down_proj.weight.copy_(
            torch.cat((compressed[: latent.latent_dim], compressed[latent.latent_dim :][turn]))
        )
        theirs.kv_layernorm.weight.copy_(attention.kv_layernorm.weight)
        theirs.linear_kv_up_proj.weight.copy_(attention.linear_kv_up_proj.weight)
        theirs.linear_proj.weight.copy_(attention.linear_proj.weight)
    return theirs


class PlainCore(SdpaCoreAttention):
    """Ours, built as Megatron's latent attention builds one: once as that of other attention."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **megatron: Any) -> None:
        super().__init__(*args, **megatron)


def test_attention_is_megatrons_own(run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is compared; on several Megatron's rotary keys get the gradient of one rank's heads."""
    # Without Transformer Engine it asks whether a linear is None's instance.
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    # Later versions take its norms from Transformer Engine alone.
    monkeypatch.setattr(MLASelfAttention, "_resolve_qk_norm_config", lambda _, parts: vars(parts), raising=False)

    def errors(model: ModelConfig) -> tuple[float, float]:
        with joined(RunConfig(model=model)) as groups:
            chunk = chunk_of(model, groups, torch.float64, VOCAB_SIZE)
            fill(chunk)
            attention: Any = chunk.decoder.layers[1].self_attention
            theirs = megatrons(attention, chunk)
            x = torch.randn(LENGTH, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            ours, _ = attention(inputs[0], None, rotary_pos_emb=rotary_turns(chunk.rotary_pos_emb(LENGTH)))
            expected, _ = theirs(inputs[1], None)
            weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
            for out in (ours, expected):
                (out * weights).sum().backward()
            return relative_error(ours, expected), relative_error(inputs[0].grad, inputs[1].grad)

    assert max(run_ranks(lambda: (*errors(PLAIN), *errors(COMPRESSED)), 1)[0]) <= 1e-12
