"""Engram against recorded tensors of the official codes, DeepSeek's and Qwen's: hashes to the bit, outputs and every gradient.

Legend: b sequences, s tokens, D hidden size, H heads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kernels.select import select_kernels
from megamem.addresses.primes import is_prime
from megamem.banks.bank import Bank
from megamem.chunk.halo import WholeSequences
from megamem.chunk.inputs import Inputs, pack
from megamem.families.engram.config import EngramConfig
from megamem.families.engram.hashing import head_sizes, numpy_multipliers, splitmix_multipliers
from megamem.families.engram.layer import EngramLayer
from megamem.families.engram.token_map import read_token_map
from megamem.placement.sharing import BankSpec, LayerView
from megamem.placement.spans import PlacementConfig
from pretrain.config.stages import load_config
from pretrain.data.compression import canonical_key, compress, write_token_map
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.planning.counts.formulas import count_parameters
from tests.golden import TOLERANCE, check, read_case, relative_error

DEEPSEEK = ("ds_basic", "ds_documents_isolated", "ds_short_seq", "ds_single_order", "ds_zero_conv")
QWEN = ("qwen_basic", "qwen_documents_isolated")
RECORDED = {
    "deepseek": {
        "table": "multi_head_embedding.embedding.weight",
        "key_proj": "key_projs.0.weight",
        "key_bias": "key_projs.0.bias",
        "value_proj": "value_proj.weight",
        "value_bias": "value_proj.bias",
        "key_gain": "norm1.0.weight",
        "query_gain": "norm2.0.weight",
        "conv_gain": "short_conv.norms.0.weight",
        "conv": "short_conv.conv.weight",
    },
    "qwen": {
        "table": "ple_embedding.ngram_embedding.weight",
        "key_proj": "key_proj.weight",
        "value_proj": "value_proj.weight",
        "key_gain": "norm_key.weight",
        "query_gain": "norm_query.weight",
        "conv_gain": "norm_conv.weight",
        "conv": "conv1d.weight",
    },
}


def memory_of(config: dict[str, Any]) -> EngramConfig:
    is_qwen = "ngram_vocab_size_base" in config
    return EngramConfig(
        rules="ple" if is_qwen else "engram",
        max_order=max(config["orders"]),
        heads_per_order=config["heads_per_order"],
        rows_per_head=config["ngram_vocab_size_base"] if is_qwen else config["table_budget_per_order"][0],
        rows_multiple=config["table_rows_padded_to_multiple_of"] if is_qwen else 1,
        value_dim=config["head_dim"],
        conv_kernel=config["conv_kernel"],
        projection_biases=config["projection_bias"],
        key_epsilon=config["eps_key"],
        query_epsilon=config["eps_query"],
        conv_epsilon=config["eps_conv"],
        vocab_size=config["unigram_vocab_size"] if is_qwen else config["vocab"],
        boundary_id=config["eos_token_id"] if is_qwen else config["pad_token_id"],
        hash_seed=config["hash_seed"],
        token_map=None if is_qwen else "recorded",
        compressed_vocab_size=None if is_qwen else config["compressed_vocab"],
    )


class Case:
    """A recorded layer, built with the recorded weights."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        kernels: Any = "auto",
        of: str = "",
    ) -> None:
        """`of` is the prefix of one of several layers."""
        self.config, self.tensors, self.dtype, self.of = config, tensors, dtype, of
        self.memory = memory_of(config)
        self.names = RECORDED["qwen" if self.memory.rules == "ple" else "deepseek"]
        table = tensors[f"param.{of}{self.names['table']}"]
        ops = select_kernels(kernels, device_type="cpu")
        rows = table.shape[0]
        spec, view = BankSpec(0, rows, (0,)), LayerView(0, 0, rows, rows)
        self.bank = Bank(spec, self.memory, ops, dtype=dtype, device="cpu", replica_rank=0)
        megatron = TransformerConfig(
            num_layers=1,
            hidden_size=config["hidden_size"],
            num_attention_heads=1,
            # Each norm has its own.
            layernorm_epsilon=0.1,
            use_cpu_initialization=True,
            params_dtype=dtype,
        )
        self.layer = EngramLayer(megatron, self.memory, view, self.bank, kernels=ops, name="layer", seed=0)
        sizes = tensors[f"const.{of}table_sizes"]
        with torch.no_grad():
            self.layer.sizes.copy_(sizes)
            self.layer.offsets.copy_(sizes.cumsum(0) - sizes)
            self.layer.multipliers.copy_(tensors[f"const.{of}multipliers"])
            if "in.token_map" in tensors:
                self.layer.token_map.copy_(tensors["in.token_map"])
            for name, theirs in self.names.items():
                recorded = tensors[f"param.{of}{theirs}"].to(dtype)
                shift = 1.0 if self.memory.rules == "ple" and name.endswith("gain") else 0.0
                self.parameter(name).copy_(recorded.view_as(self.parameter(name)) + shift)

    def parameter(self, name: str) -> torch.nn.Parameter:
        return self.bank.get_parameter("values") if name == "table" else self.layer.get_parameter(name)

    @property
    def positions(self) -> Tensor:
        """[b, s], from the start of every document where they are isolated."""
        ids = self.tensors["in.token_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
        if "in.cu_seqlens" in self.tensors:
            for start in self.tensors["in.cu_seqlens"][:-1].tolist():
                positions[:, start:] = torch.arange(ids.shape[1] - start)
        return positions

    def run(self, hidden: Tensor) -> Tensor:
        """[b, s, 1, D] of the same."""
        return (
            self.layer.initial_output(
                hidden.squeeze(2).transpose(0, 1), Inputs(pack(self.tensors["in.token_ids"], self.positions))
            )
            .transpose(0, 1)
            .unsqueeze(2)
        )

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, theirs in self.names.items():
            gradient = self.parameter(name).grad
            assert gradient is not None
            found[f"param.{self.of}{theirs}"] = gradient.view_as(self.tensors[f"param.{self.of}{theirs}"])
        return found


@pytest.mark.parametrize("kernels", ["auto", "naive"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", [*DEEPSEEK, *QWEN])
def test_a_layer_adds_what_is_recorded(
    golden_dir: Path, name: str, dtype: torch.dtype, kernels: Literal["auto", "naive"]
) -> None:
    case = Case(*read_case(golden_dir / "engram", name), dtype, kernels)
    hidden = case.tensors["in.hidden"].to(dtype).requires_grad_()
    out = case.run(hidden)
    (out * case.tensors["r"].to(dtype)).sum().backward()
    check(out, {**case.gradients(), "in.hidden": hidden.grad}, case.tensors)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_layers_hash_alike_and_apart(golden_dir: Path, dtype: torch.dtype) -> None:
    """Two layers in one residual stream, with rows computed for both at once."""
    config, tensors = read_case(golden_dir / "engram", "ds_two_layers")
    cases = [Case(config, tensors, dtype, of=f"layer{number}.") for number in (1, 3)]
    ids = pack(tensors["in.token_ids"], cases[0].positions)
    rows = EngramLayer.addresses([case.layer for case in cases], ids[0], ids[1], WholeSequences())
    inputs = Inputs(torch.cat((ids, rows)))
    hidden = tensors["in.hidden"].to(dtype).requires_grad_()
    stream = hidden.squeeze(2).transpose(0, 1)
    for place, case in enumerate(cases):
        case.layer.place = place
        recorded = tensors[f"mid.{case.of}hash_ids"] + case.layer.offsets
        assert torch.equal(inputs.addresses_of(4 * place, 4).permute(2, 1, 0), recorded)
        out = case.layer(stream, inputs)
        recorded_out = tensors[f"mid.{case.of}engram_out"].squeeze(2).transpose(0, 1)
        assert relative_error(out, recorded_out) <= TOLERANCE[dtype][0]
        stream = stream + out
    out = stream.transpose(0, 1).unsqueeze(2)
    (out * tensors["r"].to(dtype)).sum().backward()
    gradients = {name: of for case in cases for name, of in case.gradients().items()}
    check(out, {**gradients, "in.hidden": hidden.grad}, tensors)


@pytest.mark.parametrize(("conv_kernel", "biases", "gate"), [(0, False, 0.50025), (4, False, 0.5), (0, True, 0.5)])
def test_a_score_of_zero_has_a_sign_without_biases_and_convolution(conv_kernel: int, biases: bool, gate: float) -> None:
    """sigmoid(sqrt(1e-6)), as in DeepSeek V4.1's module, and a half in the others."""
    memory = EngramConfig(
        heads_per_order=2,
        rows_per_head=11,
        value_dim=6,
        vocab_size=90,
        conv_kernel=conv_kernel,
        projection_biases=biases,
    )
    megatron = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    rows, ops = sum(memory.sizes(1)[-1]), select_kernels("naive", device_type="cpu")
    bank = Bank(BankSpec(0, rows, (0,)), memory, ops, dtype=torch.float32, device="cpu", replica_rank=0)
    layer = EngramLayer(megatron, memory, LayerView(0, 0, rows, rows), bank, kernels=ops, name="layer", seed=0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
    found = layer.gate(torch.zeros(3, 1, 8), torch.ones(3, 1, memory.memory_width))
    torch.testing.assert_close(found, torch.full((3, 1), gate), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [*DEEPSEEK, *QWEN])
def test_tokens_hash_to_the_recorded_bits(golden_dir: Path, name: str) -> None:
    case = Case(*read_case(golden_dir / "engram", name), torch.float64)
    tensors, memory, layer = case.tensors, case.memory, case.layer
    found = EngramLayer.addresses([layer], tensors["in.token_ids"].T, case.positions.T, WholeSequences())
    assert torch.equal(found.permute(2, 1, 0) - layer.offsets, tensors["mid.hash_ids"])
    num, ids = memory.max_order, memory.num_hashed_ids
    if memory.rules == "ple":
        (sizes,) = head_sizes([case.config["ngram_vocab_size_base"]] * (num - 1), memory.heads_per_order, 1)
        multipliers = splitmix_multipliers(num, ids, memory.hash_seed, 0)
    else:
        (sizes,) = head_sizes(case.config["table_budget_per_order"], memory.heads_per_order, 1)
        multipliers = numpy_multipliers(num, ids, memory.hash_seed, case.config["layer_ids"][0])
    assert list(sizes) == tensors["const.table_sizes"].tolist()
    assert list(multipliers) == tensors["const.multipliers"].tolist()


@pytest.mark.parametrize(("rules", "numbers"), [("engram", (1, 4)), ("ple", (0, 1))])
def test_layers_draw_multipliers_by_the_number_that_their_rules_say(rules: Any, numbers: tuple[int, int]) -> None:
    """Layers of blocks 1 and 4, whose banks are the fourth and fifth of a model with three of another family."""
    memory = EngramConfig(
        rules=rules, heads_per_order=2, rows_per_head=11, value_dim=6, vocab_size=90, boundary_id=7, hash_seed=5,
        placement=PlacementConfig(blocks=(1, 4)),
    )  # fmt: skip
    megatron = TransformerConfig(num_layers=6, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    draw = splitmix_multipliers if rules == "ple" else numpy_multipliers
    ops = select_kernels("naive", device_type="cpu")
    for bank, number in zip((3, 4), numbers, strict=True):
        rows = sum(memory.sizes(bank - 2)[-1])
        view = LayerView(bank, 0, rows, rows, banks_before=3)
        own = Bank(BankSpec(bank, rows, (0,)), memory, ops, dtype=torch.float32, device="cpu", replica_rank=0)
        layer = EngramLayer(megatron, memory, view, own, kernels=ops, name="layer", seed=0)
        layer.calibrate(0)
        assert tuple(layer.multipliers.tolist()) == draw(memory.max_order, 90, 5, number)


@pytest.mark.parametrize("cut", [False, True])
def test_rows_are_those_of_a_loop(cut: bool) -> None:
    """Orders to 4, over ids that often are the boundary, one token at a time."""
    generator = torch.Generator().manual_seed(3)
    ids, positions = torch.randint(0, 5, (40, 3), generator=generator), torch.arange(40).unsqueeze(1).repeat(1, 3)
    positions[17:, 1] -= 17
    memory = EngramConfig(
        rules="ple" if cut else "engram", max_order=4, heads_per_order=2, rows_per_head=11, value_dim=6, vocab_size=90,
        boundary_id=2,
    )  # fmt: skip
    megatron = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    ops = select_kernels("torch", device_type="cpu")
    multipliers, sizes = torch.tensor([2**58 + 1, 2**59 + 3, 7, 2**60 - 5]), torch.tensor([11, 13, 17, 19, 23, 29])
    layers = []
    for number in range(2):
        rows = sum(memory.sizes(number + 1)[-1])
        bank = Bank(BankSpec(number, rows, (0,)), memory, ops, dtype=torch.float32, device="cpu", replica_rank=0)
        view = LayerView(number, 0, rows, rows)
        layers.append(EngramLayer(megatron, memory, view, bank, kernels=ops, name="layer", seed=0))
        # Beside another layer's.
        layers[-1].multipliers.copy_(multipliers + 2 - 2 * number)
        layers[-1].sizes.copy_(sizes + 2 - 2 * number)
        layers[-1].offsets.copy_(layers[-1].sizes.cumsum(0) - layers[-1].sizes)
    rows_of_both = EngramLayer.addresses(layers, ids, positions, WholeSequences())
    own_rows = rows_of_both[len(sizes) :]
    for token in range(40):
        for sequence in range(3):
            seen, hidden = [int(ids[token, sequence])], False
            for lag in range(1, 4):
                hidden = hidden and cut
                if positions[token, sequence] < lag or hidden:
                    seen.append(2)
                else:
                    seen.append(int(ids[token - lag, sequence]))
                    hidden = seen[-1] == 2
                if positions[token, sequence] < lag:
                    hidden = True
            mixed, expected, first = seen[0] * int(multipliers[0]), [], 0
            for order in range(1, 4):
                mixed ^= seen[order] * int(multipliers[order])
                for size in sizes[2 * order - 2 : 2 * order].tolist():
                    expected.append(first + mixed % size)
                    first += size
            assert own_rows[:, token, sequence].tolist() == expected


def test_published_tables_have_their_sizes(golden_dir: Path) -> None:
    published = json.loads((golden_dir / "engram" / "published_constants.json").read_text(encoding="utf-8"))
    for name, case in published.items():
        if not isinstance(case, dict) or "table_sizes" not in case or not isinstance(case["table_sizes"], dict):
            continue
        budgets = case["budget_per_order"]
        heads = case["heads"]
        found = head_sizes(budgets, heads, len(case["table_sizes"]))
        assert [list(sizes) for sizes in found] == list(case["table_sizes"].values()), name
        rows = list(case["rows_per_layer"].values())
        assert [sum(sizes) for sizes in found] == rows
        assert sum(rows) * case["head_dim"] == case["table_parameters"]
    qwen = published["qwen3_8_flash_next"]
    orders, heads, ids = qwen["orders"], qwen["heads_per_order"], qwen["unigram_vocab_size"]
    assert head_sizes([qwen["ngram_vocab_size_base"]] * len(orders), heads, 1) == (tuple(qwen["table_sizes"]),)
    assert splitmix_multipliers(orders[-1], ids, qwen["hash_seed"], 0) == tuple(qwen["multipliers"])
    assert not is_prime(1)
    assert [number for number in range(60) if is_prime(number)][-3:] == [47, 53, 59]


@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("27b", "engram_27b_paper"),
        ("40b", "engram_40b_paper"),
        ("v4_1_flash", "deepseek_v4_1_flash"),
        ("qwen3_8_flash_next", "qwen3_8_flash_next"),
    ],
)
def test_shipped_files_have_the_published_tables(golden_dir: Path, file: str, case: str) -> None:
    path = golden_dir / "engram" / "published_constants.json"
    published = json.loads(path.read_text(encoding="utf-8"))[case]
    model = load_config(Path(__file__).parents[2] / f"configs/engram/{file}.yaml", []).model
    banks, blocks = model.memory_plan.banks, [span.read for span in model.memory_spans]
    rows = published.get("published_rows") or list(
        published.get("rows_per_layer", {"": published.get("rows_padded_128")}).values()
    )
    assert [bank.num_rows for bank in banks] == rows
    assert isinstance(model.memory, EngramConfig)
    parameters = published.get("table_parameters_padded") or published["table_parameters"]
    assert count_parameters(model).tables == sum(rows) * model.memory.value_dim == parameters
    # Positions from 0; Qwen's layer list begins at its layer 2, which is block 1.
    assert blocks == published.get("layer_ids", [1])


def test_token_ids_are_compressed_as_recorded(golden_dir: Path) -> None:
    recorded = json.loads((golden_dir / "engram" / "token_map.json").read_text(encoding="utf-8"))
    tokens = [(each["text"], each["token"]) for each in recorded["tokens"]]
    assert [canonical_key(*each) for each in tokens] == [each["key"] for each in recorded["tokens"]]
    mapped = compress(tokens)
    assert mapped.tolist() == [each["compressed"] for each in recorded["tokens"]]
    assert mapped.max() + 1 == recorded["compressed_vocab"]


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Capitals and four kinds of spaces have no ids of their own among bytes; beyond ASCII bytes are parts of characters."""
    path = tmp_path / "map.npy"
    written = write_token_map(ByteTokenizer(), path)
    assert len(written) == 257
    assert written[ord("A")] == written[ord("a")]
    assert len({written[ord(space)] for space in " \t\r\n"}) == 1
    assert len(set(written.tolist())) == 257 - 26 - 3
    assert read_token_map(path, 257, 228).tolist() == written.tolist()
    for num_ids, num_mapped, said in (
        (258, 228, "there are 258 token ids"),
        (257, 227, "compressed_vocab_size is 227"),
    ):
        with pytest.raises(ValueError, match=said):
            read_token_map(path, num_ids, num_mapped)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token_map(tmp_path / "none.npy", 257, 228)
