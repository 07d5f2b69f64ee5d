"""Exported folders in the hands of engines: what vLLM and SGLang do with a model of transformers, done here by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported_models import export_all, load, some_tokens
from huggingface_models import BASE, HIDDEN, MODELS
from torch import Tensor, nn

from pretrain.checkpoint.store.safetensors_store import open_safetensors

transformers = pytest.importorskip("transformers", reason="exported models are loaded with it: pip install '.[hf]'")

pytestmark = pytest.mark.usefixtures("remote_code_cache")
STREAM_AND_HEADS = "midus, stream and heads, LayerNorm before attention and of queries"
MIXED_VALUES = ["move", "lave, every second, a gate per token, more rows"]
BY_TOKENS = ["move over latents", "tide", "stem", "mome"]
TWO = "v2 with one stream and lave, beside experts"
STREAMS = [
    "streams, single pass, learned keys that join later",
    "streams, gated, learned keys, query group",
    "streams, plain, query group",
]
SERVED = ["v2 beside experts, biases", "ultramem, skipping and overlapping", "midus", TWO, *BY_TOKENS, *STREAMS]
NAN, NOBODYS = float("nan"), torch.tensor([-1])
STREAMS_BY_NGRAMS = ["streams, mhc, engram", "streams, gated, ple", "streams, single pass, ngram embedding, experts"]
BY_NGRAMS = ["engram", "engram and move by n-grams", "ple", "residual n-grams", *STREAMS_BY_NGRAMS]
NAMES = [*SERVED, *MIXED_VALUES, *BY_NGRAMS, STREAM_AND_HEADS]


@pytest.fixture(scope="module")
def exported(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """A model's exported folder and its logits before, by the model's name."""
    return export_all(run_ranks, tmp_path_factory.mktemp("exported"), {name: MODELS[name] for name in NAMES})


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_makes_the_inner_model_and_brings_its_attention(exported: Any, name: str) -> None:
    """Requests lie one behind the other in one row, without masks and caches; weights are read by the engine."""
    folder, expected = exported(name)
    told: list[Any] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **others: Any) -> Any:
        told.append((module.layer_idx, mask, others["request"]))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = q @ k.transpose(2, 3) * scaling
        request, places = others["request"], torch.arange(q.shape[2])
        seen = (request[:, None] == request) & (places[:, None] >= places)
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("an engine's", attention)
    tokens = some_tokens()
    for memory_device in (None, "cpu"):
        whole = load(folder)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, memory_device=memory_device)
        config._attn_implementation = "an engine's"
        inner = transformers.AutoModel.from_config(config, trust_remote_code=True).eval()
        given = whole.model.state_dict()
        inner.load_state_dict({key: given[key] for key in given if memory_device is None or "banks" not in key})
        told.clear()
        with torch.no_grad():
            (states,) = inner(
                tokens.flatten().unsqueeze(0),
                position_ids=torch.arange(tokens.shape[1]).repeat(len(tokens)).unsqueeze(0),
                use_cache=False,
                return_dict=False,
                request=torch.arange(len(tokens)).repeat_interleave(tokens.shape[1]),
            )
            logits = whole.lm_head(states).view_as(expected)
        assert [(layer, mask) for layer, mask, _ in told] == [(layer, None) for layer in range(len(inner.layers))]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_an_engine_that_keeps_no_tokens_is_refused_by_a_memory_of_ngrams(exported: Any) -> None:
    transformers.AttentionInterface.register("an engine's", lambda *_, **__: None)
    model = load(exported("engram")[0], attn_implementation="an engine's")
    with pytest.raises(ValueError, match=r"attn_implementation is \"an engine's\".*'sdpa'"):
        model(some_tokens())
    for name in ("engram", *BY_TOKENS):
        with pytest.raises(ValueError, match="inputs_embeds are given"):
            load(exported(name)[0])(inputs_embeds=torch.zeros(1, 2, HIDDEN))


class PagedEngine:
    """Requests' tokens in one row, of each those that are new; keys and values in pages that lie anywhere, to the last.

    `steps` has, for each forward pass, the requests and how many tokens of each. Behind them come tokens of nobody, which
    fill the batch up to a size that a graph was captured for.
    """

    page, filling = 4, 3

    def __init__(self, inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inner, self.context = inner, SimpleNamespace(attn_metadata=None)
        self.keys, self.values, self.now = {}, {}, 0
        transformers.AttentionInterface.register("vllm", self.attention)
        monkeypatch.setitem(
            sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: self.context)
        )
        pages = torch.randperm(12, generator=torch.Generator().manual_seed(4)) + 1
        self.table = pages.view(3, 4).int()
        assert (self.table[:, :3] == 12).any(), "the last place of all is read"
        heads, width = BASE.query_groups, BASE.attention_head_dim
        inner.layers[0].self_attn.attn = SimpleNamespace(
            layer_name="0", kv_cache=torch.zeros(13, heads, self.page, 2 * width), num_kv_heads=heads, head_size=width
        )

    def slots(self, request: int, places: Tensor) -> Tensor:
        return self.table[request, places // self.page].long() * self.page + places % self.page

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any) -> Any:
        if self.context.attn_metadata is None:
            return torch.zeros_like(q).transpose(1, 2), None
        keys = self.keys.setdefault(module.layer_idx, torch.zeros(13 * self.page, *k.shape[1::2]))
        values = self.values.setdefault(module.layer_idx, torch.zeros_like(keys))
        out, begin = [], 0
        for request, places in self.step:
            new = self.slots(request, places)
            keys[new] = k[0, :, begin : begin + len(places)].transpose(0, 1)
            values[new] = v[0, :, begin : begin + len(places)].transpose(0, 1)
            past = self.slots(request, torch.arange(int(places[-1]) + 1))
            ours = q[0, :, begin : begin + len(places)]
            theirs = (x[past].transpose(0, 1).repeat_interleave(len(ours) // x.shape[1], 0) for x in (keys, values))
            k_all, v_all = theirs
            seen = places[:, None] >= torch.arange(len(past))
            out.append((ours @ k_all.transpose(1, 2) * scaling).masked_fill(~seen, float("-inf")).softmax(-1) @ v_all)
            begin += len(places)
        out.append(torch.full_like(out[0][:, :1], NAN).expand(-1, self.filling, -1))
        return torch.cat(out, 1).transpose(0, 1).unsqueeze(0), None

    def run(self, tokens: Tensor, steps: list[dict[int, int]]) -> Tensor:
        """Hidden states of all tokens [requests, s, D]."""
        done = [0] * len(tokens)
        states = torch.zeros(*tokens.shape, HIDDEN)
        for given in steps:
            self.step = [(request, torch.arange(done[request], done[request] + n)) for request, n in given.items()]
            counts = torch.tensor([0, *given.values()])
            self.context.attn_metadata = {
                "0": SimpleNamespace(
                    query_start_loc=counts.cumsum(0).int(),
                    block_table=self.table[list(given)],
                    slot_mapping=torch.cat([*(self.slots(*each) for each in self.step), NOBODYS.expand(self.filling)]),
                )
            }
            ids = torch.cat(
                [*(tokens[request, places] for request, places in self.step), tokens[0, : self.filling]]
            ).int()
            positions = torch.cat([*(places for _, places in self.step), torch.zeros(self.filling, dtype=torch.int64)])
            (found,) = self.inner(ids[None], position_ids=positions[None], use_cache=False, return_dict=False)
            for (request, places), part in zip(
                self.step, found[0, : -self.filling].split(list(given.values())), strict=True
            ):
                states[request, places], done[request] = part, done[request] + len(places)
        return states


@pytest.mark.parametrize("name", BY_NGRAMS)
def test_a_memory_of_ngrams_looks_back_through_an_engines_pages(
    exported: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = exported(name)
    whole = load(folder, attn_implementation="sdpa")
    inner = whole.model
    tokens = some_tokens()
    engine = PagedEngine(inner, monkeypatch)
    inner.config._attn_implementation = "vllm"
    # A trial run, before there are pages, is not held against them.
    inner(tokens[:1].int(), position_ids=torch.arange(tokens.shape[1])[None], use_cache=False)
    with torch.no_grad():
        states = engine.run(tokens[:, :15], [{1: 6, 0: 1}, {0: 5, 2: 9, 1: 1}, {1: 8, 0: 1}, {2: 6, 0: 8}])
        logits = whole.lm_head(states)
    torch.testing.assert_close(logits, expected[:, :15], rtol=0, atol=1e-5 * float(expected.abs().max()))
    inner.layers[0].self_attn.attn.layer_name = "gone"
    with pytest.raises(ValueError, match="this version of vLLM does not say where"):
        inner(tokens[:1], position_ids=torch.arange(tokens.shape[1])[None], use_cache=False)
    inner.layers[0].self_attn.attn.layer_name = "0"
    transfer = SimpleNamespace(has_kv_transfer_group=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", transfer)
    with pytest.raises(ValueError, match="kv_transfer_config"):
        inner(tokens[:1], position_ids=torch.arange(tokens.shape[1])[None], use_cache=False)
    monkeypatch.delitem(sys.modules, "vllm.distributed.kv_transfer")
    inner.pages = type(inner.pages)()
    engine.table += 1
    with pytest.raises(ValueError, match="holds tokens elsewhere"):
        inner(tokens[:1, :8].int(), position_ids=torch.arange(8)[None], use_cache=False)


def test_an_engine_that_takes_heads_or_blocks_away_is_refused(exported: Any) -> None:
    model = load(exported(STREAM_AND_HEADS)[0])
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Linear(HIDDEN, HIDDEN // 2)
    with pytest.raises(ValueError, match="tensor-parallel size of 1"):
        model(some_tokens())
    mixing = load(exported("move")[0])
    mixing.model.layers[1].self_attn.v_proj = torch.nn.Linear(HIDDEN, MODELS["move"].attention_head_dim)
    with pytest.raises(ValueError, match=r"block 1: the memory mixes its rows .* tensor-parallel size of 1"):
        mixing(some_tokens())
    model.model.layers[0] = torch.nn.Identity()
    with pytest.raises(ValueError, match="pipeline-parallel size of 1"):
        model(some_tokens())


@pytest.mark.parametrize("name", MIXED_VALUES)
def test_a_tensor_parallel_rank_mixes_into_its_own_heads(
    exported: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two ranks with a head each of two; and four, two of which have the same one."""
    model = load(exported(name)[0])
    calls: list[Any] = []
    (memory, *_) = [block.memory for block in model.model.layers if block.memory is not None]
    memory.register_forward_hook(lambda _, given, named, out: calls.append((given, named, out)), with_kwargs=True)
    with torch.no_grad():
        model(some_tokens())
        ((values, x), named, whole) = calls[0]
        halves, mixed = values.chunk(2, -1), whole.chunk(2, -1)
        for size in (2, 4):
            for rank in range(size):
                engine = SimpleNamespace(
                    get_tensor_model_parallel_rank=lambda rank=rank: rank,
                    get_tensor_model_parallel_world_size=lambda size=size: size,
                )
                monkeypatch.setitem(sys.modules, "sglang.srt.distributed", engine)
                half = 2 * rank // size
                assert torch.equal(memory(halves[half], x, **named), mixed[half])


class SglangNorm(nn.Module):
    """SGLang's norm, which stands where a class's name ends with RMSNorm, with its epsilon if that has a known name."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(replaced.weight))
        self.eps: Any = getattr(replaced, "eps", getattr(replaced, "variance_epsilon", 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def sglang_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **given: Any) -> Any:
    """As in its `srt/models/transformers.py`: a layer's own attention, of rows of tokens, which alone knows requests."""
    assert mask is None
    rows = (part.transpose(1, 2).reshape(q.shape[-2], -1) for part in (q, k, v))
    return given["attention_instances"][module.layer_idx](*rows, given["forward_batch"], scaling), None


def radix_attention(config: Any) -> Callable[..., Tensor]:
    """[T, heads d] of rows [T, heads d] of queries, keys and values; heads are as the configuration says."""

    def attend(q: Tensor, k: Tensor, v: Tensor, request: Tensor, scaling: float) -> Tensor:
        groups = config.num_attention_heads // config.num_key_value_heads
        queries = q.view(len(q), config.num_attention_heads, config.head_dim)
        keys, values = (part.view(len(q), -1, config.head_dim).repeat_interleave(groups, 1) for part in (k, v))
        places = torch.arange(len(q))
        seen = (request[:, None] == request) & (places[:, None] >= places)
        scores = torch.einsum("thd,uhd->htu", queries, keys) * scaling
        return torch.einsum("htu,uhd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values).flatten(1)

    return attend


@pytest.mark.parametrize("name", [*SERVED, *MIXED_VALUES])
def test_sglangs_fallback_has_what_it_reads(exported: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The steps of its source, one by one: nobody here can run it, as it asks for a GPU."""
    folder, expected = exported(name)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    # srt/model_loader/utils.py: the class behind `auto_map.AutoModel`, which says that it takes others' attention. Any of
    # these keys would make it look for experts of a form that ours do not have.
    inner = transformers.dynamic_module_utils.get_class_from_dynamic_module(config.auto_map["AutoModel"], str(folder))
    assert inner._supports_attention_backend
    moe_keys = ("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts")
    assert not any(hasattr(config, key) for key in moe_keys)
    # srt/models/transformers.py: the inner model is made with parameters on no device, and buffers on one.
    transformers.AttentionInterface.register("sglang", sglang_attention)
    config._attn_implementation = "sglang"
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        register(module, key, None if parameter is None else nn.Parameter(parameter.to("meta")))

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "register_parameter", register_empty)
        model = transformers.AutoModel.from_config(config, trust_remote_code=True).eval()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    # Linear layers are split by the plan's patterns, all of which are of modules that are there, or of other models'.
    linears = [f"model.{key}" for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan = {f"model.{pattern}": style for pattern, style in model.config.base_model_tp_plan.items()}
    assert set(plan.values()) == {"colwise", "rowwise"}
    assert all(any(re.match(pattern, key) for pattern in plan) for key in linears)
    norms = [(key, module) for key, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    # Gated residual streams leave those of queries and keys alone.
    assert len(norms) > len(model.layers)
    for key, module in norms:
        model.set_submodule(key, SglangNorm(module))
    model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, device="meta"))
    model.to_empty(device="cpu")
    # srt/models/utils.py: every tensor of the files is a parameter or buffer of the same name.
    stored = open_safetensors(folder)
    weights = {key: stored.read(info.whole(key)) for key, info in stored.tensors.items()}
    head = weights.pop("lm_head.weight", weights["model.embed_tokens.weight"])
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert weights.keys() == {f"model.{key}" for key in held}
    for key, weight in weights.items():
        held[key.removeprefix("model.")].data.copy_(weight)
    tokens = some_tokens()
    with torch.no_grad():
        states = model(
            input_ids=tokens.flatten().unsqueeze(0),
            inputs_embeds=None,
            use_cache=False,
            position_ids=torch.arange(tokens.shape[1]).repeat(len(tokens)).unsqueeze(0),
            return_dict=False,
            forward_batch=torch.arange(len(tokens)).repeat_interleave(tokens.shape[1]),
            attention_instances=dict.fromkeys(range(config.num_hidden_layers), radix_attention(config)),
        )[0][0]
    logits = (states @ head.T).view_as(expected)
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
