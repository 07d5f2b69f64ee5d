"""A decoder-only transformer with memory layers, for inference and fine-tuning with transformers.

Legend: b sequences, s tokens of each, D hidden size, d width of a head.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file, can_return_tuple

from .configuration_megamem import MegamemConfig
from .memory_megamem import MegamemBank, MegamemMemory, mapped_tensor, rms_normalise


class MegamemRMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalise(x, self.weight, self.epsilon)


class MegamemLayerNorm(nn.Module):
    """Layer normalisation with a gain and a bias, in at least fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gain, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), gain.shape, gain, bias, self.epsilon).to(x.dtype)


def rotations(positions: Tensor, config: MegamemConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [b, 1, s, d] of RoPE at positions [b, s]."""
    kind, factor = config.rope_parameters["rope_type"], 1.0
    if kind == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (steps / config.head_dim)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, positions.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [b, heads, s, d]: the first half of d is turned with the second."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Visible:
    """Positions that each token of a forward pass may attend to."""

    def __init__(self, attention_mask: Tensor | None, tokens: Tensor, cache: Cache | None) -> None:
        """
        Args:
            attention_mask: [b, keys], 0 at padding; or already [b, 1, s, keys].
            tokens: [b, s, D].
            cache: before it is updated.
        """
        self.before = 0 if cache is None else int(cache.get_seq_length())
        self.batch, self.size, self.device = tokens.shape[0], tokens.shape[1], tokens.device
        self.ready = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
        padded = attention_mask is not None and self.ready is None and not bool(attention_mask.all())
        self.present = attention_mask if padded else None

    def mask(self, num_keys: int) -> Tensor | None:
        """[b, 1, s, keys] for so many keys; None where a token sees all that is before it in its sequence and itself.

        Made once: every block has as many keys.
        """
        if self.ready is not None:
            return self.ready
        whole = num_keys == self.before + self.size and (self.before == 0 or self.size == 1)
        if self.present is None and whole:
            return None
        keys = torch.arange(num_keys, device=self.device)
        places = torch.arange(self.before, self.before + self.size, device=self.device).unsqueeze(1)
        seen = (keys <= places).expand(self.batch, 1, self.size, num_keys)
        if self.present is not None:
            present = F.pad(self.present.bool(), (0, num_keys - self.present.shape[1]))
            # Padding that saw nothing would be a mean over no values: it sees itself, and nobody reads it.
            seen = seen & (present[:, None, None] | (keys == places))
        self.ready = seen
        return seen


class MegamemAttention(nn.Module):
    """Causal self-attention with grouped queries; of some inserted blocks without an output projection."""

    def __init__(self, config: MegamemConfig, layer_idx: int, *, projects: bool) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False) if projects else nn.Identity()
        self.q_norm = MegamemRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = MegamemRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.grouped = config.num_key_value_heads < config.num_attention_heads

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None) -> Tensor:
        """[b, s, D] of [b, s, D]."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q).transpose(1, 2), *rotation)
        k = rotate(self.k_norm(k).transpose(1, 2), *rotation)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        mask = visible.mask(k.shape[2])
        # Without a mask one token sees the whole cache, or nothing is before the sequence.
        causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MegamemMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., D] of [..., D], times a weight [..., 1] per token."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner if weight is None else (inner * weight).to(x.dtype))


class MegamemExperts(nn.Module):
    """A mixture of experts: each token passes the `top_k` that its router weights most."""

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__()
        moe = config.moe
        self.top_k, self.renormalise = moe["top_k"], moe["renormalise"]
        self.gate = nn.Linear(config.hidden_size, moe["num_experts"], bias=False)
        self.experts = nn.ModuleList(
            MegamemMLP(config.hidden_size, moe["intermediate_size"]) for _ in range(moe["num_experts"])
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, D] of [b, s, D]; routed in fp32."""
        x = hidden.flatten(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.gate.weight.to(wide))
        if self.renormalise:
            best, chosen = logits.topk(self.top_k, dim=-1)
            weights = best.softmax(-1)
        else:
            weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens], weights[tokens, places].unsqueeze(1)))
        return out.view_as(hidden)


class MegamemBlock(nn.Module):
    """h + attention, then h + feed-forward + memory. A memory may stand alone, or its output be added later.

    An inserted block is h + memory of what attention says, or of h and that, and nothing else.
    """

    def __init__(self, config: MegamemConfig, layer_idx: int) -> None:
        super().__init__()
        layers = config.memory["layers"] if config.memory is not None else []
        here = next((layer for layer in layers if layer["block"] == layer_idx), None)
        self.slot = None if here is None else here["slot"]
        self.inserted = self.slot in ("inserted", "stream_and_heads", "projected", "block")
        norm = MegamemLayerNorm if here is not None and here["layer_norm"] else MegamemRMSNorm
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MegamemAttention(config, layer_idx, projects=self.slot not in ("stream_and_heads", "block"))
        if not self.inserted:
            self.post_attention_layernorm = MegamemRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module | None = None
        if self.slot in (None, "beside", "skip"):
            dense = config.moe is None
            self.mlp = MegamemMLP(config.hidden_size, config.intermediate_size) if dense else MegamemExperts(config)
        self.memory = None if here is None else MegamemMemory(config, here)
        self.layer_idx = layer_idx

    def forward(
        self,
        h: Tensor,
        rotation: tuple[Tensor, Tensor],
        visible: Visible,
        cache: Cache | None,
        banks: nn.ModuleDict,
        waiting: dict[int, list[Tensor]],
    ) -> Tensor:
        """The residual stream [b, s, D] after the block.

        Args:
            waiting: outputs of memories by the block after which they are added; this block takes and puts.
        """
        attended = self.self_attn(self.input_layernorm(h), rotation, visible, cache)
        if self.inserted and self.memory is not None:
            given = h + attended if self.slot in ("inserted", "stream_and_heads") else attended
            return h + self.memory(given, banks[str(self.memory.layer["bank"])])
        h = h + attended
        normal = self.post_attention_layernorm(h)
        outputs = [] if self.mlp is None else [self.mlp(normal)]
        later = self.layer_idx
        if self.memory is not None:
            later = self.memory.layer["added_after"]
            output = self.memory(normal, banks[str(self.memory.layer["bank"])])
            if later > self.layer_idx:
                waiting.setdefault(later, []).append(output)
            else:
                outputs.append(output)
        h = h + sum(outputs[1:], outputs[0])
        for output in waiting.pop(self.layer_idx, []):
            h = h + output
        return h


class MegamemPreTrainedModel(PreTrainedModel):
    """Base class that transformers asks of every model."""

    config_class = MegamemConfig
    base_model_prefix = "model"
    _no_split_modules = ["MegamemBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = [r"memory\.u$", r"memory\.v$"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights that no file has: for models that are made from a configuration."""
        super()._init_weights(module)
        if isinstance(module, MegamemMemory | MegamemBank):
            for parameter in module.parameters(recurse=False):
                if not getattr(parameter, "_is_hf_initialized", False):
                    parameter.normal_(0.0, self.config.initializer_range)


class MegamemModel(MegamemPreTrainedModel):
    """Embedding, blocks, norm; and the banks that the blocks' memories read."""

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MegamemBlock(config, number) for number in range(config.num_hidden_layers))
        self.norm = MegamemRMSNorm(config.hidden_size, config.rms_norm_eps)
        bank_rows = config.memory["bank_rows"] if config.memory is not None else []
        self.banks = nn.ModuleDict({str(number): MegamemBank(config, rows) for number, rows in enumerate(bank_rows)})
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [b, s, D] of `input_ids` [b, s], and the cache with theirs."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if position_ids is None:
            before = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            position_ids = torch.arange(before, before + h.shape[1], device=h.device).unsqueeze(0)
        visible = Visible(attention_mask, h, past_key_values)
        rotation = rotations(position_ids, self.config, h.dtype)
        waiting: dict[int, list[Tensor]] = {}
        states = [h]
        for block in self.layers:
            h = block(h, rotation, visible, past_key_values, self.banks, waiting)
            states.append(h)
        h = states[-1] = self.norm(h)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=h,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(states) if wanted else None,
        )


class MegamemForCausalLM(MegamemPreTrainedModel, GenerationMixin):
    """The model with its output projection."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        self.model = MegamemModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.memory_device is not None:
            self._keys_to_ignore_on_load_unexpected = [r"^model\.banks\."]
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """See transformers. With `memory_device="cpu"` the tables stay in their files, mapped into memory."""
        where = {
            key: kwargs[key]
            for key in ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
            if kwargs.get(key) is not None
        }
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config.memory_device is not None:
            model._map_tables(pretrained_model_name_or_path, where)
        return loaded

    def _map_tables(self, folder: Any, where: dict[str, Any]) -> None:
        """Give every bank its tables as tensors that are pages of the weights' files."""

        def file(name: str, **options: Any) -> Any:
            return cached_file(folder, name, **where, **options)

        index = file("model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
        names: dict[str, str] = {}
        if index is not None:
            with open(index, encoding="utf-8") as stream:
                names = json.load(stream)["weight_map"]
        banks: dict[str, Any] = dict(self.model.banks)
        for number, bank in banks.items():
            for table in bank.names:
                key = f"model.banks.{number}.{table}"
                bank.on_host[table] = mapped_tensor(file(names.get(key, "model.safetensors")), key)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """See transformers; not of a model without its tables."""
        if self.config.memory_device is not None:
            raise ValueError("the tables of this model stayed in its folder (memory_device is set): copy the folder")
        super().save_pretrained(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [b, s, vocabulary] of tokens [b, s], and with labels [b, s] (-100: not counted) the mean loss.

        Args:
            attention_mask: [b, tokens in the cache and here], 0 at padding.
            logits_to_keep: of how many tokens, from the end; 0: of all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=kwargs.pop("output_hidden_states", None),
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
