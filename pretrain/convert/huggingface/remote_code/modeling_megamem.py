"""A decoder-only transformer with memory layers, for inference and fine-tuning with transformers.

Legend: b sequences, s tokens of each, n residual streams, D hidden size. Of one stream [n, D] is [D], and [n] is not there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention_megamem import (
    MegamemAttention,
    MegamemDownProjection,
    MegamemLatentAttention,
    MegamemLayerNorm,
    MegamemRMSNorm,
    rotations,
)
from .configuration_megamem import MegamemConfig
from .memory_megamem import Banks, MegamemBank, MegamemMemory, banks_of
from .ngrams_megamem import MegamemNgramMemory, Ngrams, hashed, ngrams_of, places_in_texts, recent_tokens
from .pages_megamem import ENGINE, MegamemPages
from .streams_megamem import MegamemStreams, joined, make_end, make_site, started, written
from .token_tables_megamem import (
    MegamemChosenRows,
    MegamemMixedValues,
    MegamemNgramEmbedding,
    MegamemSharedRead,
    MegamemSummedRows,
    MegamemTokenFeedForward,
    MegamemTokenMixture,
    MegamemValueNgrams,
    MegamemWeightedRows,
    TokenRows,
    first_bank,
)

# transformers 5.24 gave the cache another name everywhere, and 5.40 drops the first one.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"

BlockOutput = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The residual streams [b, s, n, D]; weights [b, s, n] that the next block reads them with, where kinds of streams have such;
a memory's output that is added later; attention's weights; the normalised stream, where memories of later blocks read with
it."""

# Kinds of memories, whose parameters are their own.
_MEMORIES = (
    MegamemMemory,
    MegamemNgramMemory,
    MegamemMixedValues,
    MegamemValueNgrams,
    MegamemNgramEmbedding,
    MegamemChosenRows,
    MegamemTokenMixture,
    MegamemTokenFeedForward,
    MegamemWeightedRows,
)
# Slots of memories that are all that their block adds, and those among them that are given the residual stream too.
_INSERTED, _GIVEN_STREAM = {"inserted", "stream_and_heads", "projected", "block"}, {"inserted", "stream_and_heads"}
# Slots of memories that are given the heads of attention, which then has no output projection.
_GIVEN_HEADS = {"stream_and_heads", "block"}


@dataclass(frozen=True)
class Tokens:
    """The tokens, as memories read them that they address: by n-grams, by their ids, or, of two kinds, by both."""

    ngrams: Ngrams | None = None
    rows: TokenRows | None = None

    def to(self, device: torch.device) -> Tokens:
        return Tokens(
            None if self.ngrams is None else self.ngrams.to(device), None if self.rows is None else self.rows.to(device)
        )


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


class MegamemRouter(nn.Module):
    """Scores of experts, in at least fp32. No linear layer: engines compute those in the model's dtype."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


class MegamemExperts(nn.Module):
    """A mixture of experts: each token passes the `top_k` that its router weights most."""

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__()
        moe = config.moe
        self.top_k, self.renormalise = moe["top_k"], moe["renormalise"]
        self.gate = MegamemRouter(config.hidden_size, moe["num_experts"])
        self.experts = nn.ModuleList(
            MegamemMLP(config.hidden_size, moe["intermediate_size"]) for _ in range(moe["num_experts"])
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, D] of [b, s, D]; routed in fp32."""
        x = hidden.flatten(0, 1)
        logits = self.gate(x)
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


class MegamemBlock(GradientCheckpointingLayer):
    """h + attention, then h + feed-forward + memory. A memory may stand alone, or its output be added later.

    An inserted block is h + memory of what attention says, or of h and that, and nothing else. A memory of n-grams is
    added before attention; one of a token's rows may act inside of attention, or as the feed-forward. Of several residual
    streams attention and feed-forward read one h each, and write into all (`streams_megamem.py`).
    """

    def __init__(self, config: MegamemConfig, layer_idx: int) -> None:
        super().__init__()
        layers = [(memory, layer) for memory in config.memories for layer in memory["layers"]]
        here = [(memory, layer) for memory, layer in layers if layer["block"] == layer_idx]
        slots = {layer["slot"] for _, layer in here}
        self.inserted, self.adds_stream = not slots.isdisjoint(_INSERTED), not slots.isdisjoint(_GIVEN_STREAM)
        norm = MegamemLayerNorm if any(layer["layer_norm"] for _, layer in here) else MegamemRMSNorm
        norms = () if config.reads_normalised else (config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = norm(*norms) if norms else nn.Identity()
        projects = slots.isdisjoint(_GIVEN_HEADS)
        if config.latent_attention is None:
            self.self_attn: nn.Module = MegamemAttention(config, layer_idx, projects=projects)
        else:
            mixes_keys = "latents" in slots
            self.self_attn = MegamemLatentAttention(config, layer_idx, projects=projects, mixes_keys=mixes_keys)
        if not self.inserted:
            self.post_attention_layernorm = MegamemRMSNorm(*norms) if norms else nn.Identity()
        self.mlp: nn.Module | None = None
        if not self.inserted and "instead" not in slots:
            dense = config.moe is None
            self.mlp = MegamemMLP(config.hidden_size, config.intermediate_size) if dense else MegamemExperts(config)
        self.memory: nn.Module | None = None
        self.second_memory: nn.Module | None = None
        for memory, layer in here:
            setattr(self, "memory" if memory is config.memory else "second_memory", _made(config, memory, layer))
        self.lends_query = any(layer["queried"] == layer_idx < layer["block"] for _, layer in layers)
        self.is_added_later = any(layer["added_after"] > layer_idx for _, layer in here)
        self.layer_idx, self.num_blocks = layer_idx, config.num_hidden_layers
        self.attention_streams, self.ffn_streams = make_site(config), make_site(config)

    def forward(
        self,
        h: Tensor,
        banks: Banks,
        tokens: Tokens | None = None,
        query: Tensor | None = None,
        carried: Tensor | None = None,
        *joining: Tensor,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BlockOutput:
        """The block's part of a forward pass, from the residual streams `h` [b, s, n, D].

        Args:
            tokens: the tokens, in the forms in which memories that they address read them.
            query: the normalised stream of the block that the memory reads with, if that is an earlier one.
            carried: weights [b, s, n] that streams are read with, where kinds of them have such.
            joining: outputs [b, s, D] of earlier blocks' memories that are added after this one.
            cache: the cache, by the name that this version of transformers has for it, as is `past_key_values`. Where
                blocks are recomputed, transformers takes it away by that name.
            kwargs: arguments of attention.
        """
        tokens = Tokens() if tokens is None else tokens
        cache = past_key_values if cache is None else cache
        memories = [memory for memory in (self.memory, self.second_memory) if memory is not None]
        for memory in memories:
            if isinstance(memory, MegamemNgramMemory) and tokens.ngrams is not None:
                recent = tokens.ngrams.paged or recent_tokens(cache, self.num_blocks)
                h = h + memory(h, banks[memory.layer["bank"]], tokens.ngrams, recent)
            if isinstance(memory, MegamemNgramEmbedding) and tokens.rows is not None:
                # All streams are the embedding still.
                embedded = h if h.dim() == 3 else h[:, :, 0]
                embedded = memory(embedded, tokens.rows.of(memory.memory), banks[memory.layer["bank"]])
                h = embedded if h.dim() == 3 else embedded.unsqueeze(2).repeat(1, 1, h.shape[2], 1)
            if isinstance(memory, MegamemWeightedRows) and tokens.rows is not None:
                h = memory(h, tokens.rows.shared)
            if (
                isinstance(memory, (MegamemMixedValues, MegamemValueNgrams, MegamemChosenRows))
                and tokens.rows is not None
            ):
                addresses = tokens.rows.of(memory.memory)
                kwargs["mix"] = partial(memory, addresses=addresses, look_up=banks[memory.layer["bank"]])
        read = self.attention_streams(h, carried)
        attended, weights = self.self_attn(self.input_layernorm(read.update), cache=cache, **kwargs)
        # Such a kind is the only one of its model.
        if self.inserted and isinstance(self.memory, MegamemMemory):
            if attended.shape != h.shape:
                raise ValueError(
                    f"block {self.layer_idx}: the memory reads all heads of attention, and tensor parallelism split "
                    "them: run this model with a tensor-parallel size of 1"
                )
            given = h + attended if self.adds_stream else attended
            return h + self.memory(given, banks[self.memory.layer["bank"]]), None, None, weights, None
        h = written(h, attended, read)
        read = self.ffn_streams(h, read.carried)
        normal = self.post_attention_layernorm(read.update)
        outputs = [] if self.mlp is None else [self.mlp(normal)]
        later = None
        for memory in memories:
            if isinstance(memory, MegamemTokenMixture) and tokens.rows is not None:
                outputs.append(memory(normal, tokens.rows.shared))
            if isinstance(memory, MegamemTokenFeedForward) and tokens.rows is not None:
                outputs.append(memory(normal, tokens.rows.of(memory.memory), banks[memory.layer["bank"]]))
            if isinstance(memory, MegamemMemory):
                output = memory(normal if query is None else query, banks[memory.layer["bank"]])
                if self.is_added_later:
                    later = output
                else:
                    outputs.append(output)
        h = written(h, sum(outputs[1:], outputs[0]), read)
        for output in joining:
            h = joined(h, output.to(h.device), read)
        return h, read.carried, later, weights, normal if self.lends_query else None


def _made(config: MegamemConfig, memory: dict[str, Any], layer: dict[str, Any]) -> nn.Module:
    """A memory of a kind, for one layer."""
    match memory["scoring"]:
        case "ngrams":
            return MegamemNgramMemory(config, memory, layer)
        case "tokens" if layer["slot"] == "embedding":
            return MegamemNgramEmbedding(config, memory, layer)
        case "tokens" if layer["slot"] == "entry":
            return MegamemWeightedRows(layer)
        case "tokens" if "router_bias" in layer["weights"]:
            return MegamemChosenRows(config, memory, layer)
        case "tokens" if "gate" in layer["weights"]:
            return MegamemValueNgrams(config, memory, layer)
        case "tokens" if layer["slot"] in ("values", "latents"):
            return MegamemMixedValues(memory, layer)
        case "tokens" if layer["slot"] == "instead":
            return MegamemTokenFeedForward(memory, layer)
        case "tokens":
            return MegamemTokenMixture(layer)
        case _:
            return MegamemMemory(config, memory, layer)


class MegamemPreTrainedModel(PreTrainedModel):
    """Base class that transformers asks of every model."""

    config_class = MegamemConfig
    base_model_prefix = "model"
    _no_split_modules = ["MegamemBlock", "MegamemBank"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = [r"memory\.u$", r"memory\.v$"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        if config.hot_rows and config.memory_device is None:
            raise ValueError(
                f"hot_rows is {config.hot_rows}, but all rows are in the model: set memory_device='cpu' too"
            )
        if config.memory_device is not None:
            self._keys_to_ignore_on_load_unexpected = [r"^(model\.)?banks\."]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """See transformers. With `memory_device="cpu"` the tables stay in their files, mapped into memory.

        Raises:
            ValueError: the files lack weights, for which transformers would draw random ones.
        """
        keys = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
        where = {key: kwargs[key] for key in keys if kwargs.get(key) is not None}
        tells = kwargs.pop("output_loading_info", False)
        loaded, told = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if missing := sorted(told["missing_keys"]):
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{pretrained_model_name_or_path} is damaged: its files lack {missing[0]}{others}")
        for module in loaded.modules():
            if isinstance(module, MegamemBank):
                module.map_tables(pretrained_model_name_or_path, **where)
        return (loaded, told) if tells else loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Weights that no file has: for models that are made from a configuration."""
        super()._init_weights(module)
        if isinstance(module, (*_MEMORIES, MegamemBank, MegamemRouter, MegamemDownProjection, MegamemStreams)):
            for parameter in module.parameters(recurse=False):
                if not getattr(parameter, "_is_hf_initialized", False):
                    parameter.normal_(0.0, self.config.initializer_range)

    def reload_tables(self, folder: Any = None, **where: Any) -> None:
        """Read the memories' tables again, and nothing else: after a patch has been applied to the model's folder, or from another
        folder of the same model. Mapped tables are mapped again, of which nothing is read.

        Args:
            folder: the folder, or its name on the hub; None: the model's own.
            where: further arguments of `cached_file`.

        Raises:
            ValueError: the files lack a table, or have another; all tables stay as they are.
        """
        banks = [module for module in self.modules() if isinstance(module, MegamemBank)]
        tables = [bank.mapped(self.config.name_or_path if folder is None else folder, **where) for bank in banks]
        for bank, of_bank in zip(banks, tables, strict=True):
            bank.take(of_bank)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """See transformers; not of a model without its tables."""
        if self.config.memory_device is not None:
            raise ValueError("the tables of this model stayed in its folder (memory_device is set): copy the folder")
        super().save_pretrained(*args, **kwargs)


class MegamemModel(MegamemPreTrainedModel):
    """Embedding, blocks, norm; and the banks that the blocks' memories read. Several residual streams begin as copies of the
    embedding, and end as one before the norm."""

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MegamemBlock(config, number) for number in range(config.num_hidden_layers))
        self.streams_end = make_end(config)
        has_norm = not config.reads_normalised
        self.norm = MegamemRMSNorm(config.hidden_size, config.rms_norm_eps) if has_norm else nn.Identity()
        layers = [layer for memory in config.memories for layer in memory["layers"]]
        # Of a block's two memories one acts in attention, which hands nothing on.
        self.added_after = {x["block"]: x["added_after"] for x in layers if x["added_after"] > x["block"]}
        self.queried = {x["block"]: x["queried"] for x in layers if x["queried"] < x["block"]}
        banks = [(number, memory) for memory in config.memories for number in banks_of(memory)]
        self.banks = nn.ModuleDict({str(number): MegamemBank(config, memory, number) for number, memory in banks})
        addressed = [memory for memory in config.memories if memory["scoring"] == "tokens"]
        self.reads_rows = bool(addressed)
        # Hashes that are addresses of rows, in place of ids. Folders of earlier versions have ids alone.
        self.addresses = {first_bank(each): each["address"] for each in addressed if each.get("address") is not None}
        self.by_ngrams = next((memory for memory in config.memories if memory["scoring"] == "ngrams"), None)
        self.shared_read, self.bank_read_once = None, 0
        for together in (memory for memory in addressed if memory["reads_once"]):
            at_entry = together["layers"][0]["slot"] == "entry"
            self.shared_read = MegamemSummedRows(together) if at_entry else MegamemSharedRead(config, together)
            self.bank_read_once = together["layers"][0]["bank"]
        self.pages = MegamemPages()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [b, s, D] of `input_ids` [b, s], and the cache with theirs.

        Args:
            attention_mask: [b, tokens in the cache and here], 0 at padding; or as attention takes it, [b, 1, s, keys],
                which does not tell memories of n-grams where a text begins: `position_ids` do.
            past_key_values, cache: one and the same, as transformers before 5.24 names it, and since.
            position_ids: [b, s]. Without a mask and a cache, documents that begin at 0 do not see each other.
            output_hidden_states: return the streams [b, s, n, D] before every block, and the last hidden state.
            kwargs: arguments of attention.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if not all(isinstance(block, MegamemBlock) for block in self.layers):
            raise ValueError(
                "pipeline stages took blocks away, and blocks read banks that they share: run this model with a "
                "pipeline-parallel size of 1"
            )
        config = self.config
        with_attentions = config.output_attentions if output_attentions is None else output_attentions
        if with_attentions and config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions: attn_implementation is {config._attn_implementation!r}, which does not make them; "
                "load the model with attn_implementation='eager'"
            )
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        if position_ids is None:
            before = 0 if cache is None else int(cache.get_seq_length())
            position_ids = torch.arange(before, before + h.shape[1], device=h.device).unsqueeze(0)
        mask = create_causal_mask(
            config=config,
            inputs_embeds=h,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        banks, tokens = Banks(self.banks), None
        if self.reads_rows or self.looks_back:
            if input_ids is None:
                raise ValueError("inputs_embeds are given, but token ids address the memory: give input_ids")
            plain = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
            # Hashes and rows need 64 bits, and engines give 32.
            tokens = self._tokens(input_ids.long(), h, banks, position_ids, plain, cache)
        given = {
            "position_embeddings": rotations(position_ids, config, h.dtype),
            "attention_mask": mask,
            CACHE: cache,
            "position_ids": position_ids,
            **kwargs,
        }
        waiting, queries = defaultdict[int, list[Tensor]](list), dict[int, Tensor]()
        carried = None
        if config.residual_streams is not None:
            h, carried = started(h, config.residual_streams)
        with_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, attentions = [h], []
        for number, block in enumerate(self.layers):
            query, joining = queries.get(self.queried.get(number, number)), waiting.pop(number, [])
            h, carried, later, weights, normal = block(h, banks, tokens, query, carried, *joining, **given)
            if normal is not None:
                queries[number] = normal
            if later is not None:
                waiting[self.added_after[number]].append(later)
            if with_states:
                states.append(h)
            attentions.append(weights)
        if self.streams_end is not None:
            h = self.streams_end(h, carried)
        h = states[-1] = self.norm(h)
        return BaseModelOutputWithPast(
            last_hidden_state=h,
            **{CACHE: cache if use_cache else None},
            hidden_states=tuple(states) if with_states else None,
            attentions=tuple(attentions) if with_attentions else None,
        )

    def _tokens(
        self, input_ids: Tensor, h: Tensor, banks: Banks, position_ids: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tokens:
        """The tokens' rows, and their n-grams, where memories read them; see `_ngrams`."""
        ngrams_of_kind = partial(self._ngrams, input_ids, position_ids, mask, cache)
        ngrams = None if self.by_ngrams is None else ngrams_of_kind(self.by_ngrams, "ids")
        if not self.reads_rows:
            return Tokens(ngrams)
        # Each kind looks back at more or fewer tokens.
        by_bank = {
            bank: hashed(ngrams_of_kind(address, f"ids of bank {bank}"), address)
            for bank, address in self.addresses.items()
        }
        rows = TokenRows(input_ids.unsqueeze(0), by_bank)
        if self.shared_read is not None:
            read = self.shared_read(rows.of(self.shared_read.memory), h, banks[self.bank_read_once])
            rows = replace(rows, shared=read)
        return Tokens(ngrams, rows)

    def _ngrams(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        settings: dict[str, Any],
        reader: str,
    ) -> Ngrams:
        """The tokens' n-grams; the cache keeps what those of the next tokens need, under a reader's name.

        Raises:
            ValueError: an engine brings its attention and keeps no tokens.
        """
        config = self.config
        if config._attn_implementation == ENGINE:
            paged = self.pages.of_step(self.layers[0].get_submodule("self_attn"), position_ids)
            if paged is not None:
                return ngrams_of(input_ids, position_ids, settings, paged, reader)
        elif config._attn_implementation not in ("eager", "sdpa", "flex_attention"):
            raise ValueError(
                f"attn_implementation is {config._attn_implementation!r}, whose engine keeps keys and values by itself and "
                "not the last tokens, which the memory's n-grams and convolutions read: generate with transformers, "
                "attn_implementation='sdpa'"
            )
        is_continued = cache is not None and int(cache.get_seq_length()) > 0
        places = places_in_texts(position_ids, mask, is_continued=is_continued)
        return ngrams_of(input_ids, places, settings, recent_tokens(cache, config.num_hidden_layers), reader)

    @property
    def looks_back(self) -> bool:
        """True if memories read tokens before a text's new ones."""
        return self.by_ngrams is not None or bool(self.addresses)


class MegamemForCausalLM(MegamemPreTrainedModel, GenerationMixin):
    """The model with its output projection."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MegamemConfig) -> None:
        super().__init__(config)
        self.model = MegamemModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # What was forgotten cannot be taken back, as assisted generation does.
        self._is_stateful = self.model.looks_back
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [b, s, vocabulary] of tokens [b, s], and with labels [b, s] (-100: not counted) the mean loss.

        Args:
            attention_mask: [b, tokens in the cache and here], 0 at padding.
            logits_to_keep: number of tokens, from the end, whose logits are wanted; 0: all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
