"""Our model as a `config.json` of Hugging Face's, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from megamem.addresses.ngrams import MISSING_ID, NgramAddressConfig
from megamem.banks.shuffle import KeyedShuffle
from megamem.config.memory import MemoryConfig, Ngrams, Scoring
from megamem.config.model import ModelConfig
from megamem.placement.block_plan import inserted_blocks, plan_blocks
from megamem.placement.placed import PlacedMemory
from megamem.retrieval.config import RetrievalConfig, TuckerConfig
from megamem.token_tables.config import TokenTableConfig
from pretrain.checkpoint.store.tensors import TensorInfo
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import RunConfig
from pretrain.convert.huggingface.names import memory_weights, shared_weights
from pretrain.convert.huggingface.refused import refused
from pretrain.convert.huggingface.rope import imported_base, imported_scaling, rope_parameters
from pretrain.errors import CheckpointError, ConfigError

LLAMA, QWEN2, QWEN3, OWN = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MegamemForCausalLM"
_MISTRAL = "MistralForCausalLM"
"""Llama's blocks and names, where its window is switched off."""
_PLAIN = (LLAMA, QWEN2, QWEN3, _MISTRAL)
# As transformers fills in what a file leaves out.
_DEFAULTS = {
    QWEN2: {"num_key_value_heads": 32},
    QWEN3: {"num_key_value_heads": 32, "head_dim": 128},
    _MISTRAL: {"num_key_value_heads": 8, "sliding_window": 4096},
}
# What other models that look alike have, and no block of ours.
_OTHERS = {
    "Olmo2ForCausalLM": "its norms stand behind attention and feed-forward, and queries and keys are normalised over all "
    "heads together",
    "Olmo3ForCausalLM": "its norms stand behind attention and feed-forward, and queries and keys are normalised over all "
    "heads together",
}
AUTO_MAP = {
    "AutoConfig": "configuration_megamem.MegamemConfig",
    "AutoModel": "modeling_megamem.MegamemModel",
    "AutoModelForCausalLM": f"modeling_megamem.{OWN}",
}
"""Classes in the code that goes with `OWN`, as `config.json` names them."""
_MODEL_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3", OWN: "megamem"}
# Keys by which a model of that class is plain.
_IDLE: dict[str, dict[str, Any]] = {
    LLAMA: {"attention_bias": False, "mlp_bias": False},
    QWEN2: {"use_sliding_window": False},
    QWEN3: {"attention_bias": False, "use_sliding_window": False},
}

# Weights of `remote_code/memory_megamem.py`: those that it needs, and those that there may be besides.
_TUCKER_WEIGHTS = {"query_proj", "query_norm", "keys", "keys_norm", "cores", "u", "v", "value_proj"}
_PRODUCT_OPTIONS = {
    *("query_bias", "query_norm", "value_proj", "value_bias"),
    *("silu_gate", "silu_gate_bias", "output_gate", "output_gate_bias"),
}
# Those of `remote_code/ngrams_megamem.py`.
_NGRAM_WEIGHTS = {"key_proj", "value_proj", "key_gain", "query_gain", "multipliers"}
_NGRAM_OPTIONS = {"key_bias", "value_bias", "conv", "conv_gain", "token_map"}
_WEIGHTS: dict[Scoring, tuple[set[str], set[str]]] = {
    Scoring.TUCKER: (_TUCKER_WEIGHTS, {"pre_value_proj", "permutation"}),
    Scoring.PRODUCT: ({"query_proj", "keys"}, _PRODUCT_OPTIONS),
    Scoring.HEADS: ({"keys", "expansion"}, {"query_gain", "query_bias"}),
    Scoring.ROWS: ({"query_proj", "keys"}, set()),
    Scoring.NGRAMS: (_NGRAM_WEIGHTS, _NGRAM_OPTIONS),
    # Those of `remote_code/token_tables_megamem.py`.
    Scoring.TOKENS: (
        set(),
        {"gate_proj", "router", "router_of_values", "router_bias", "gate", "gate_bias", "up_proj", "down_proj", "gain"},
    ),
}

# Those whose layers have keys.
_BY_KEYS = (Scoring.TUCKER, Scoring.PRODUCT, Scoring.HEADS, Scoring.ROWS)


def architecture_of(model: ModelConfig) -> str:
    """The class of transformers that computes what the model does: its own where no other does exactly that."""
    parts = (model.memory, model.moe, model.latent_attention, model.residual_streams)
    if any(part is not None for part in parts):
        return OWN
    return _backbone(model)


def _backbone(model: ModelConfig) -> str:
    if model.qkv_bias:
        return OWN if model.qk_norm else QWEN2
    return QWEN3 if model.qk_norm else LLAMA


def exported_config(
    model: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    eod: int,
    dtype: torch.dtype,
    seed: int,
    tensors: Mapping[str, TensorInfo],
    table_bits: int | None = None,
) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        vocab_size: token ids before padding.
        sequence_length: the longest that the model was trained on.
        eod: id of the token that ends a document, which also begins one.
        dtype: dtype of the weights.
        seed: the run's, which keys the shuffles.
        tensors: ours, by global name.
        table_bits: bits of an element of the memory's tables; None: they have the dtype of weights.

    Raises:
        CheckpointError: the exported model does not know the memory's family.
    """
    # Tables with a row for every token id have as many as the tokenizer has, where the run leaves that to it.
    model = replace(model, vocab_size=vocab_size)
    architecture = architecture_of(model)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.attention_head_dim,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope_parameters(model),
        "max_position_embeddings": sequence_length,
        "initializer_range": model.linear_std,
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": eod,
        # No padding token: transformers would keep its embedding from being trained, and this one ends documents.
        "eos_token_id": eod,
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if architecture != OWN:
        return {**config, "hidden_act": "silu", "attention_dropout": 0.0, **_IDLE[architecture]}
    moe, latent = None, None
    memories = {key.removeprefix("model."): _memory(model, key, seed, tensors) for key in model.families}
    if model.latent_attention is not None:
        latent = to_dict(model.latent_attention)
    if model.moe is not None:
        moe = {
            "num_experts": model.moe.num_experts,
            "top_k": model.moe.top_k,
            "intermediate_size": model.moe.expert_ffn_hidden_size,
            "renormalise": model.moe.renormalise,
        }
    return {
        **config,
        "auto_map": AUTO_MAP,
        # Without these blocks, it may be a model that transformers knows.
        **({"backbone": _backbone(model)} if inserted_blocks(model) and latent is None else {}),
        "qk_norm": model.qk_norm,
        "qkv_bias": model.qkv_bias,
        "latent_attention": latent,
        "residual_streams": _streams(model),
        "moe": moe,
        "memory": None,
        "second_memory": None,
        **{key: {**memory, "table_bits": table_bits} for key, memory in memories.items()},
        "memory_device": None,
        "native": _native(model, seed),
    }


def _native(model: ModelConfig, seed: int) -> dict[str, Any]:
    """Configuration that makes it a model of ours again."""
    # Its branch for further tokens is left out.
    exported = replace(model, multi_token_prediction=None)
    plain = to_dict(RunConfig(seed=seed, model=exported))
    return {"seed": seed, "model": plain["model"]}


def _streams(model: ModelConfig) -> dict[str, Any] | None:
    streams = model.residual_streams
    if streams is None:
        return None
    site, end = streams.site_shapes(model.hidden_size), streams.end_shapes(model.hidden_size)
    return {
        "count": streams.count,
        "kind": streams.kind,
        "iterations": streams.iterations,
        "epsilon": streams.epsilon,
        "norm_epsilon": model.norm_epsilon if streams.norm_epsilon is None else streams.norm_epsilon,
        "site_weights": {name: list(shape) for name, shape in site.items()},
        "end_weights": {name: list(shape) for name, shape in end.items()},
    }


def _memory(model: ModelConfig, key: str, seed: int, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The memories of the family that `key` configures."""
    memory = model.families[key]
    if memory.control != "none":
        raise _unknown(key, memory, f"with {key}.control {memory.control}, a control of comparisons")
    scoring = memory.scoring
    if scoring is None:
        raise _unknown(key, memory, "which chooses what it reads neither by scores nor by tokens")
    needed, options = _WEIGHTS[scoring]
    of_family = [(index, layer) for index, layer in enumerate(model.memory_layers) if layer.memory.kind == memory.kind]
    # With what follows from the number of token ids.
    memory = of_family[0][1].memory
    banks = model.banks_of(memory)
    ngrams = memory.ngrams(len(of_family))
    layers: list[dict[str, Any]] = []
    plans = plan_blocks(model)
    for index, layer in of_family:
        span, view = layer.span, layer.view
        weights = memory_weights(model, index, tensors)
        if not needed <= weights.keys() <= needed | options:
            odd = sorted((needed - weights.keys()) | (weights.keys() - needed - options))
            raise _unknown(key, memory, f"whose weights are others than the exported model's: {', '.join(odd)}")
        layers.append(
            {
                "block": span.read,
                "added_after": span.add,
                "queried": span.read if span.queried is None else span.queried,
                "slot": memory.slot_of(span).name,
                "layer_norm": plans[span.read].has_layer_norm,
                "bank": view.bank,
                "first_row": view.first_row,
                "num_rows": view.num_rows,
                # The rows that entries, or hashes, stand for.
                **({"round_keys": _round_keys(layer, seed)} if scoring in _BY_KEYS else {}),
                **({} if ngrams is None else {"head_rows": list(ngrams.head_rows[layer.number])}),
                "weights": {name: list(info.shape) for name, info in weights.items()},
            }
        )
    return {
        "scoring": scoring.value,
        **(_key_settings(memory, layers) if scoring in _BY_KEYS else {}),
        **({} if ngrams is None else _ngram_settings(ngrams)),
        **(_token_settings(memory, tensors) if scoring == Scoring.TOKENS else {}),
        "num_sums": memory.lookup.bins,
        "activation": memory.lookup.activation,
        "tables": {table.name: table.width for table in memory.tables},
        "first_bank": banks[0].index,
        "bank_rows": [bank.num_rows for bank in banks],
        "layers": layers,
    }


def _key_settings(memory: MemoryConfig, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # Every layer has as many.
    num_heads = layers[0]["weights"]["keys"][0]
    return {
        "queries": memory.query if isinstance(memory, TuckerConfig) else None,
        "num_heads": num_heads,
        "row_top_k": memory.row_top_k if isinstance(memory, RetrievalConfig) else memory.lookup.rows // num_heads,
        "top_k": memory.lookup.rows // num_heads,
        "num_scores": memory.lookup.scores,
    }


def _token_settings(memory: MemoryConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    assert isinstance(memory, TokenTableConfig)
    return {
        "rows_per_token": memory.lookup.rows,
        **memory.exported,
        "slots_per_address": memory.slots_per_address,
        "address": None if memory.address is None else _address_settings(memory.address),
        "num_gate_heads": memory.lookup.scores,
        "reads_once": memory.reads_once,
        "shared_weights": {name: list(info.shape) for name, info in shared_weights(tensors).items()}
        if memory.reads_once
        else {},
    }


def _address_settings(address: NgramAddressConfig) -> dict[str, Any]:
    return {
        "max_order": address.max_order,
        "boundary_id": address.boundary_id,
        "missing_id": MISSING_ID,
        "cut_at_boundary": address.cuts_at_boundary,
        **asdict(address.hashes),
        "signs": None if address.sign_hashes is None else asdict(address.sign_hashes),
    }


def _ngram_settings(ngrams: Ngrams) -> dict[str, Any]:
    return {
        "max_order": ngrams.max_order,
        "boundary_id": ngrams.boundary_id,
        "cut_at_boundary": ngrams.cuts_at_boundary,
        "epsilons": list(ngrams.epsilons),
    }


def _round_keys(layer: PlacedMemory, seed: int) -> list[int] | None:
    """Round keys of a memory layer's shuffle; None: it has none that is drawn from a seed."""
    memory = layer.memory
    if not isinstance(memory, TuckerConfig) or memory.shuffle != "keyed":
        return None
    return list(KeyedShuffle(memory.expansion * layer.view.num_keys, seed=seed, name=layer.name).round_keys)


def _unknown(key: str, memory: MemoryConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"{key}.kind is {memory.kind}, {why}: such a model cannot be exported to Hugging Face; convert it to another format"
    )


def imported_config(config: Mapping[str, Any], origin: str) -> RunConfig:
    """The configuration of a run that goes on with the model of a `config.json`; what that does not say has its default.

    Args:
        config: its content: of a Llama, a Qwen2 or 3, a Mistral, or a model that was exported.
        origin: name of the content in messages.

    Raises:
        CheckpointError: the model is none that ours can be; the message names the key and the value of what they
            cannot.
    """
    if config.get("architectures") == [OWN]:
        native = config.get("native")
        if not isinstance(native, dict) or native.keys() != {"seed", "model"}:
            raise refused(origin, "native", native, "it says which model of ours was exported: copy the file again")
        try:
            found = from_dict(native, f"native in {origin}")
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        if found.model.vocab_size is None:
            raise refused(origin, "native.model.vocab_size", None, "it must be a number")
        return found
    return RunConfig(model=_imported_model(config, origin))


def _imported_model(config: Mapping[str, Any], origin: str) -> ModelConfig:
    match config.get("architectures"):
        case [str(architecture)] if architecture in _PLAIN:
            pass
        case [str(architecture)] if architecture in _OTHERS:
            raise refused(origin, "architectures", [architecture], f"{_OTHERS[architecture]}, and no block here is so")
        case other:
            can_be = ", ".join(str([each]) for each in (*_PLAIN, OWN))
            raise CheckpointError(f"{origin}: architectures is {other}, and one of {can_be} can be imported")
    config = {**_DEFAULTS.get(architecture, {}), **config}
    _check_plain(config, origin)
    heads, hidden = _whole(config, "num_attention_heads", origin), _whole(config, "hidden_size", origin)
    head_dim = _whole(config, "head_dim", origin, hidden // heads)
    groups = _whole(config, "num_key_value_heads", origin, heads)
    try:
        return ModelConfig(
            num_layers=_whole(config, "num_hidden_layers", origin),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=None if groups == heads else groups,
            head_dim=None if head_dim * heads == hidden else head_dim,
            ffn_hidden_size=_whole(config, "intermediate_size", origin),
            vocab_size=_whole(config, "vocab_size", origin),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == QWEN3,
            qkv_bias=architecture == QWEN2,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rotary_base=imported_base(config, origin),
            rotary_scaling=imported_scaling(config, origin),
        )
    except ValueError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _check_plain(config: Mapping[str, Any], origin: str) -> None:
    """Refuse what the values of other keys make of a model."""
    for key, wanted in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0,
        "use_sliding_window": False,
        "partial_rotary_factor": 1,
        "pretraining_tp": 1,
    }.items():
        if key in config and config[key] != wanted:
            raise refused(origin, key, config[key], f"imported models have {wanted}")
    if config.get("quantization_config") is not None:
        raise refused(origin, "quantization_config", "set", "import the model's weights as they were before")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise refused(origin, "sliding_window", config["sliding_window"], "imported models attend to whole sequences")
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise refused(origin, "layer_types", kinds, "imported models attend to whole sequences")


def _whole(config: Mapping[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise refused(origin, key, config.get(key), "it must be a whole number from 1 on")
    return value
