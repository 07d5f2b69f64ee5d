"""Exported models compute what they computed before: logits of every family, in transformers, from the folder alone."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import in_fewer_bits
from exported_models import export_all, load, some_tokens
from grown_tables import grow
from huggingface_models import BASE, MODELS, TOKEN_MAP, VOCAB_SIZE
from torch import Tensor

from megamem.families.engram.config import EngramConfig
from megamem.families.engram.token_map import read_token_map
from pretrain.convert.huggingface.folder import open_folder
from pretrain.convert.registry import open_checkpoint
from pretrain.convert.resources import Resources
from pretrain.errors import CheckpointError
from pretrain.patch.apply import change
from pretrain.patch.file import read_patch
from pretrain.patch.identity import tables_of
from pretrain.patch.make import make_patch
from tests.changed_rows import ChangedRows
from tests.rotation import in_rotation

transformers = pytest.importorskip("transformers", reason="exported models are loaded with it: pip install '.[hf]'")

pytestmark = pytest.mark.usefixtures("remote_code_cache")
GROWN = ["midus", "midus, stream and heads, LayerNorm before attention and of queries", "linear_memory, inserted"]
BY_TOKENS = ["move over latents", "tide", "stem", "mome", "residual n-grams"]
TWO = "v2 with one stream and lave, beside experts"
# Of several residual streams one of each kind; two of them look back.
STREAMS = [
    "streams, mhc, engram",
    "streams, gated, ple",
    "streams, single pass, learned keys that join later",
    "streams, plain, query group",
]
SAVED = in_rotation(
    [
        *("v2, permutation, no pre-values", "peer", "engram beside experts", "ple", TWO),
        *("streams, static, instead of feed-forwards", *STREAMS, *GROWN[1:], *BY_TOKENS),
    ]
)
TRAINED = in_rotation(
    [
        "v2",
        "ultramem, skipping and overlapping",
        "moe",
        "memory_plus",
        "ultramem, inserted, queries per head",
        "engram",
        "ple",
        TWO,
        *GROWN,
        *BY_TOKENS,
        *STREAMS,
    ]
)
OF_SHARE = in_rotation(list(MODELS))
OWN = [name for name in OF_SHARE if not name.startswith("dense")]


@pytest.fixture(scope="module")
def exported(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """A model's exported folder and its logits before, by the model's name."""
    return export_all(run_ranks, tmp_path_factory.mktemp("exported"), MODELS)


@pytest.fixture(scope="module")
def loaded(exported: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A model as transformers loads it, and what it says of that, by the model's name. For tests that leave it as it is."""

    @functools.cache
    def of(name: str) -> tuple[Any, dict[str, Any]]:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            exported(name)[0], trust_remote_code=True, output_loading_info=True
        )
        return model.eval(), report

    return of


@pytest.mark.parametrize("name", OF_SHARE)
def test_logits_are_the_same(exported: Any, loaded: Any, name: str) -> None:
    _, expected = exported(name)
    model, report = loaded(name)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model(some_tokens()).logits
    scale = float(expected.abs().max())
    assert scale > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-6 * scale)


@pytest.mark.parametrize("name", OWN)
def test_cached_decoding_is_the_full_forward(exported: Any, loaded: Any, name: str) -> None:
    """One by one, several at once after others, and in a cache of fixed size."""
    _, expected = exported(name)
    (model, _), tokens = loaded(name), some_tokens()
    fixed = transformers.StaticCache(config=model.config, max_cache_len=40)
    for cache, steps in ((None, (5, 1, 1, 9)), (fixed, (4, 1, 5, 6))):
        found = []
        for part in tokens.split(list(steps), dim=1):
            with torch.no_grad():
                out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name", in_rotation(["v2", "moe", "midus", "engram", "engram and move by n-grams", "ple", *BY_TOKENS, *STREAMS])
)
def test_generation_is_that_of_full_forwards_whatever_the_padding(loaded: Any, name: str) -> None:
    model, _ = loaded(name)
    tokens, num_new = some_tokens(2, 9), 6
    alone = []
    for prompt in (tokens[:1], tokens[1:, 4:]):
        sequence = prompt
        for _ in range(num_new):
            with torch.no_grad():
                logits = model(sequence, use_cache=False).logits[:, -1]
            sequence = torch.cat((sequence, logits.argmax(-1, keepdim=True)), 1)
        alone.append(sequence[0, -num_new:])
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        out = model.generate(
            tokens, attention_mask=mask, max_new_tokens=num_new, do_sample=False, eos_token_id=None, **options
        )
        assert [row[-num_new:].tolist() for row in out] == [row.tolist() for row in alone], options


@pytest.mark.parametrize("name", ["v2", "engram", "ple", *STREAMS[:2]])
def test_padding_is_seen_by_nobody(exported: Any, loaded: Any, name: str) -> None:
    _, expected = exported(name)
    padded = torch.cat((torch.zeros(3, 4, dtype=torch.int64), some_tokens()), 1)
    mask = (torch.arange(20) >= 4).long().expand(3, -1)
    with torch.no_grad():
        for given in ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, {}):
            logits = loaded(name)[0](padded, attention_mask=mask, **given).logits
            assert not logits.isnan().any()
            torch.testing.assert_close(logits[:, 4:], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", OWN)
def test_tables_may_stay_in_the_files(exported: Any, name: str) -> None:
    folder, expected = exported(name)
    model = load(folder, memory_device="cpu")
    assert not [key for key in model.state_dict() if "banks" in key]
    with torch.no_grad():
        torch.testing.assert_close(
            model(some_tokens()).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


@pytest.mark.parametrize(
    ("name", "bits"),
    in_rotation(
        [
            *(("v2, ring, gelu", bits) for bits in (8, 4)),
            *((name, 8) for name in ("engram", "tide", "move over latents")),
            *((name, 4) for name in ("midus", "engram and move by n-grams", "stem")),
        ]
    ),
)
def test_tables_in_fewer_bits_are_rounded_rows(exported: Any, tmp_path: Path, name: str, bits: int) -> None:
    """Loaded, mapped from the files, and with rows that are kept: to the bit the same."""
    folder, _ = exported(name)
    rounded = load(folder)
    with torch.no_grad():
        for bank in rounded.model.banks.values():
            for table in bank.parameters():
                scale = (table.double().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).float()
                table.copy_((table.double() / scale.double()).round() * scale)
        expected = rounded(some_tokens()).logits
    path = in_fewer_bits(folder, bits, tmp_path)
    found = []
    for given in ({}, {"memory_device": "cpu"}, {"memory_device": "cpu", "hot_rows": 7}):
        model = load(path, **given)
        with torch.no_grad():
            found += [model(some_tokens()).logits for _ in range(3)]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert all(torch.equal(other, found[0]) for other in found)
    assert any(hot.num_found for bank in model.model.banks.values() for hot in bank.hot.values())
    # And come in again as what they were rounded to.
    imported = open_folder(path).tensors
    for number, bank in rounded.model.banks.items():
        for table, weight in bank.named_parameters():
            info = imported.tensors[f"banks.{number}.{table}"]
            read = imported.read(info.whole(f"banks.{number}.{table}"))
            torch.testing.assert_close(read, weight.detach(), rtol=1e-6, atol=0)
    config = json.loads((path / "config.json").read_text())
    config["memory"]["table_bits"] = 5
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"memory\.table_bits is 5: it may be null, 8 or 4"):
        open_folder(path)
    config["memory"]["table_bits"] = bits
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hot_rows is 7, but all rows are in the model"):
        load(path, hot_rows=7)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_the_name_that_transformers_gives_it(
    exported: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As before transformers 5.24, and as from 5.40 on, which knows no other; `test_huggingface_folder.py` has both."""
    folder, expected = exported("v2")
    model, tokens = load(folder), some_tokens()
    code = sys.modules[type(model).__module__]
    make, own = code.create_causal_mask, code.CACHE

    def make_mask(
        *, config: Any, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor, **given: Any
    ) -> Any:
        assert given.keys() == {name}
        return make(config, inputs_embeds, attention_mask, position_ids=position_ids, **{own: given[name]})

    monkeypatch.setattr(code, "create_causal_mask", make_mask)
    monkeypatch.setattr(code, "CACHE", name)
    for output in ("BaseModelOutputWithPast", "CausalLMOutputWithPast"):
        monkeypatch.setattr(code, output, SimpleNamespace)
    with torch.no_grad():
        first = model(tokens[:, :-1], use_cache=True)
        last = model(tokens[:, -1:], **{name: getattr(first, name)})
    found = torch.cat([first.logits, last.logits], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_folder_with_other_tables_is_a_model_to_measure(exported: Any, tmp_path: Path) -> None:
    table_bytes = grow(exported("v2, ring, gelu")[0], 24, tmp_path)
    for device in (None, "cpu"):
        model = load(tmp_path, memory_device=device)
        banks = list(model.model.banks.values())
        tables = [bank.on_host[name] if device else getattr(bank, name) for bank in banks for name in bank.names]
        assert sum(table.nbytes for table in tables) == table_bytes
        assert {len(table) for table in tables} == set(model.config.memory["bank_rows"])
        assert {layer["num_rows"] for layer in model.config.memory["layers"]} == {24**2}
        with torch.no_grad():
            assert model(some_tokens()).logits.isfinite().all()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("bits", [None, 4])
def test_tables_outside_take_none_of_a_processs_own_memory(exported: Any, tmp_path: Path, bits: int | None) -> None:
    """Some 430 MB, or 65, in holes of a file: what is added is the rest of the model and the rows that are kept."""

    def own_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    table_bytes = grow(exported("v2, ring, gelu")[0], 1500, tmp_path, bits)
    before = own_bytes()
    model = load(tmp_path, memory_device="cpu", hot_rows=64)
    with torch.no_grad():
        assert model(some_tokens(1, 2)).logits.isfinite().all()
    assert own_bytes() - before < table_bytes / 3
    assert table_bytes > 6e7


def patch_all_rows(folder: Path) -> None:
    """Apply a patch that moves every row of every table."""
    run = open_checkpoint(folder)
    rows = {table: tuple(range(shape[0])) for table, shape in tables_of(run).items()}
    changed, resources = replace(run, reader=ChangedRows(run.reader, rows, 1e-3)), Resources(1, 2 << 30)
    patch = folder.with_name("rows.safetensors")

    def silent(*_: object) -> Any:
        return lambda _: None

    make_patch(run, changed, patch, max_bytes=1 << 24, resources=resources, on_start=silent)
    change(read_patch(patch), folder, None, to="after", output=None, resources=resources, on_start=silent)


@pytest.mark.parametrize(
    ("name", "bits"),
    in_rotation([*((name, None) for name in ("v2", "engram", TWO, "tide", "mome", GROWN[0])), ("v2", 8), (TWO, 4)]),
)
def test_a_running_model_takes_a_patch_without_being_loaded_again(
    exported: Any, tmp_path: Path, name: str, bits: int | None
) -> None:
    """Tables in the model, mapped, and with rows kept from them; until it is told, it goes on with the rows that it has."""
    folder = tmp_path / "model"
    if bits is None:
        shutil.copytree(exported(name)[0], folder)
    else:
        folder.mkdir()
        in_fewer_bits(exported(name)[0], bits, folder)
    models = [
        load(folder, **options) for options in ({}, {"memory_device": "cpu"}, {"memory_device": "cpu", "hot_rows": 9})
    ]
    others = {key: tensor.clone() for key, tensor in models[0].state_dict().items() if "banks." not in key}
    with torch.no_grad():
        before = [model(some_tokens()).logits for model in models]
        patch_all_rows(folder)
        # Rows that are mapped or kept are those of before.
        assert all(torch.equal(model(some_tokens()).logits, old) for model, old in zip(models, before, strict=True))
        expected = load(folder)(some_tokens()).logits
        for model in models:
            model.reload_tables()
            torch.testing.assert_close(
                model(some_tokens()).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max())
            )
    assert (expected - before[0]).abs().max() > 1e-3 * expected.abs().max()
    assert all(torch.equal(models[0].state_dict()[key], tensor) for key, tensor in others.items())


def test_tables_of_another_model_are_refused_and_nothing_changes(exported: Any) -> None:
    model = load(exported("v2")[0])
    with torch.no_grad():
        before = model(some_tokens()).logits
        with pytest.raises(ValueError, match="damaged, or of another model"):
            model.reload_tables(exported("peer")[0])
        assert torch.equal(model(some_tokens()).logits, before)


def test_a_model_without_its_tables_is_not_saved(exported: Any, tmp_path: Path) -> None:
    model = load(exported("v2")[0], memory_device="cpu")
    with pytest.raises(ValueError, match="copy the folder"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", SAVED)
def test_a_folder_that_transformers_saved_is_the_same_model(exported: Any, tmp_path: Path, name: str) -> None:
    folder, expected = exported(name)
    load(folder).save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(some_tokens()).logits, expected, rtol=0, atol=1e-5)
    # And is one that we can go on with.
    shutil.copy(folder / "tokenizer.json", tmp_path)
    before, after = open_folder(folder), open_folder(tmp_path)
    assert after.config == before.config
    assert after.model == MODELS[name]
    assert after.tensors.tensors == before.tensors.tensors
    for key, info in before.tensors.tensors.items():
        assert torch.equal(after.tensors.read(info.whole(key)), before.tensors.read(info.whole(key)))


@pytest.mark.parametrize("name", ["v2", "streams, plain, query group"])
def test_in_bf16_what_selects_stays_in_fp32(exported: Any, name: str) -> None:
    folder, expected = exported(name)
    model = load(folder, dtype=torch.bfloat16)
    dtypes = {key.rsplit(".", 1)[-1]: value.dtype for key, value in model.state_dict().items()}
    assert dtypes.pop("u") == dtypes.pop("v") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    with torch.no_grad():
        logits = model(some_tokens()).logits
    # Tokens differ a lot where a rounding selects others; on the whole it is the same model.
    agreement = torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1)
    assert float(agreement.median()) > 0.99


@pytest.mark.parametrize("name", TRAINED)
def test_labels_give_a_loss_that_trains_every_weight(exported: Any, name: str) -> None:
    folder, expected = exported(name)
    model, tokens = load(folder), some_tokens()
    labels = tokens.clone()
    labels[0, :5] = -100
    loss = model(tokens, labels=labels).loss
    by_hand = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, by_hand, rtol=1e-5, atol=1e-6)
    loss.backward()
    idle = [key for key, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert idle == []


@pytest.mark.parametrize("name", ["dense, as llama", "dense, as qwen3", "v2"])
def test_the_tokenizer_is_ours_beside_any_class_of_model(exported: Any, name: str) -> None:
    """Transformers has ideas of its own about the tokenizers of Llama and Qwen."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported(name)[0], trust_remote_code=True)
    text = " a  b\n\u4e2d\u00e9 <s>"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("a<|endoftext|>").input_ids == [97, 256]
    # The padding is on the right, or generation's own left, and does not count.
    assert tokenizer(["a", "abc"], padding=True).attention_mask == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        ("midus", "Qwen3ForCausalLM"),
        ("midus, llama3, all heads, no qk_norm, biases", "Qwen2ForCausalLM"),
        ("midus, stream and heads, LayerNorm before attention and of queries", "Qwen3ForCausalLM"),
        ("pkm, inserted", "Qwen3ForCausalLM"),
    ],
)
def test_without_the_inserted_blocks_a_grown_model_is_its_base(exported: Any, name: str, backbone: str) -> None:
    """transformers' own class computes with the other blocks what the grown model does while its tables are zero."""
    folder, _ = exported(name)
    grown = load(folder)
    assert grown.config.backbone == backbone
    for bank in grown.model.banks.values():
        torch.nn.init.zeros_(bank.values)
    inserted = {layer["block"] for layer in grown.config.memory["layers"]}
    kept = [number for number in range(grown.config.num_hidden_layers) if number not in inserted]
    plain = grown.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "max_position_embeddings")
    kind = getattr(transformers, backbone)
    base = kind(kind.config_class(**{key: plain[key] for key in (*names, *more)}, num_hidden_layers=len(kept)))
    weights = {}
    for key, weight in grown.state_dict().items():
        head, _, rest = key.removeprefix("model.layers.").partition(".")
        if key.startswith("model.banks.") or (key.startswith("model.layers.") and int(head) in inserted):
            continue
        in_block = key.startswith("model.layers.")
        weights[f"model.layers.{kept.index(int(head))}.{rest}" if in_block else key] = weight
    base.load_state_dict(weights)
    with torch.no_grad():
        found, expected = base.eval()(some_tokens()).logits, grown(some_tokens()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))


def test_beams_take_their_last_tokens_along_and_none_are_taken_back(exported: Any) -> None:
    """Beams that change places in the cache are those of full forward passes."""
    model, prompt = load(exported("engram")[0]), some_tokens(2, 7)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    found = [model.generate(prompt, attention_mask=mask, use_cache=kept, **options) for kept in (True, False)]
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompt, attention_mask=mask, assistant_model=load(exported("v2")[0]), max_new_tokens=2)
    cache = model(prompt).past_key_values
    with pytest.raises(ValueError, match="without an assistant"):
        cache.crop(-1)


def test_the_map_of_token_ids_goes_along(exported: Any) -> None:
    folder, _ = exported("engram")
    imported = open_folder(folder)
    memory = imported.model.memory
    assert isinstance(memory, EngramConfig)
    assert memory.token_map is not None
    assert Path(memory.token_map) == folder / "token_map.npy"
    assert read_token_map(Path(memory.token_map), VOCAB_SIZE, 50).tolist() == [number % 50 for number in range(257)]
    assert replace(imported.model, memory=replace(memory, token_map=TOKEN_MAP)) == MODELS["engram"]


@pytest.mark.parametrize("name", ["v2", "midus"])
def test_the_inner_model_is_loaded_alone(exported: Any, loaded: Any, name: str) -> None:
    folder, expected = exported(name)
    head = loaded(name)[0].lm_head
    for device in (None, "cpu"):
        inner = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True, memory_device=device).eval()
        with torch.no_grad():
            logits = head(inner(some_tokens()).last_hidden_state)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["v2", "engram", "ple", *STREAMS[:2]])
def test_documents_that_begin_at_0_in_one_row_do_not_see_each_other(exported: Any, loaded: Any, name: str) -> None:
    _, expected = exported(name)
    tokens = some_tokens()
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens)).unsqueeze(0)
    with torch.no_grad():
        logits = loaded(name)[0](tokens.flatten().unsqueeze(0), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits.view_as(expected), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_attention_is_shown_where_it_is_made(exported: Any) -> None:
    folder, expected = exported("v2")
    with torch.no_grad():
        out = load(folder, attn_implementation="eager")(some_tokens(), output_attentions=True)
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert len(out.attentions) == BASE.num_layers
    for weights in out.attentions:
        assert weights.shape == (3, BASE.num_attention_heads, 16, 16)
        assert not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        load(folder)(some_tokens(), output_attentions=True)
    with pytest.raises(ValueError, match="Flash Attention"):
        load(folder, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("name", TRAINED)
def test_gradient_checkpointing_computes_blocks_again_and_the_same_gradients(exported: Any, name: str) -> None:
    model, tokens = load(exported(name)[0]).train(), some_tokens()
    found, calls = [], []
    for _ in range(2):
        model.zero_grad()
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        hooks = [block.self_attn.register_forward_pre_hook(count) for block in model.model.layers]
        model(tokens, labels=tokens).loss.backward()
        for hook in hooks:
            hook.remove()
        found.append({key: weight.grad.clone() for key, weight in model.named_parameters()})
        model.gradient_checkpointing_enable()
    blocks = len(model.model.layers)
    assert calls == [blocks, 2 * blocks]
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=0, atol=0, msg=key)


PLACED = in_rotation(
    [
        "v2 beside experts, biases",
        "ultramem, skipping and overlapping",
        "peer",
        "midus",
        "engram",
        "engram and move by n-grams",
        TWO,
        *BY_TOKENS,
        *STREAMS,
    ]
)


@pytest.mark.parametrize("name", PLACED)
def test_accelerate_finds_places_by_itself(exported: Any, loaded: Any, tmp_path: Path, name: str) -> None:
    folder, expected = exported(name)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in loaded(name)[0].parameters())
    model = load(folder, device_map="auto", max_memory={"cpu": num_bytes - 1}, offload_folder=str(tmp_path))
    assert "disk" in model.hf_device_map.values()
    with torch.no_grad():
        logits = model(some_tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", PLACED)
def test_accelerate_may_leave_weights_on_disk(exported: Any, tmp_path: Path, name: str) -> None:
    folder, expected = exported(name)
    blocks = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(MODELS[name].num_layers)}
    places = {"model.embed_tokens": "cpu", "model.norm": "disk", "lm_head": "cpu", "model.banks": "disk", **blocks}
    places |= {"model.shared_read": "disk"} if name == "tide" else {}
    places |= {"model.streams_end": "disk"} if MODELS[name].residual_streams is not None else {}
    model = load(folder, device_map=places, offload_folder=str(tmp_path))
    assert {weight.device.type for weight in model.parameters()} == {"cpu", "meta"}
    with torch.no_grad():
        logits = model(some_tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
