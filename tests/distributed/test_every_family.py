"""Models of every family, and one for every value of its options, derived from the registry and the schema: families and
options that come later are asked too.

Every key of a memory makes a difference, every norm adds the configured epsilon, every parameter takes the first step of
its optimizer group, and the closed formulas count it. What a layer tells of its reads is where its table gets gradients.
"""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Any, Literal

import pytest
import torch
from keys_table import set_key
from tiny_runs import VOCAB_SIZE, build, joined
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamem.addresses.ngrams import NgramAddressConfig
from megamem.config.memory import MemoryConfig
from megamem.config.model import LatentAttentionConfig, ModelConfig, MoEConfig
from megamem.families.registry import FAMILIES
from megamem.layers.usage import LayerUsage
from megamem.model import MemoryGPTModel
from megamem.parameters.declaration import group_of, matrices_of
from parallel.groups import ParallelGroups
from pretrain.config.keys import ineffective_fields
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schedule import group_settings
from pretrain.config.schema import RunConfig, TrainConfig
from pretrain.engine.build import build_chunks
from pretrain.engine.muon import units_of
from pretrain.engine.update_rules import ReplicaRanges
from pretrain.planning.counts.formulas import count_parameters
from pretrain.planning.counts.pipeline_stages import stages_of
from tests.rotation import in_rotation

KINDS = in_rotation(list(FAMILIES))
HIDDEN, EPSILON = 16, 0.25
DENSE = RunConfig(
    model=ModelConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=20,
        vocab_size=VOCAB_SIZE,
        vocab_size_multiple=16,
        norm_epsilon=EPSILON,
    ),
    train=TrainConfig(num_steps=3, global_batch_size=2, micro_batch_size=2, sequence_length=8),
    # No two groups step alike.
    optimizer=OptimizerConfig(
        lr=1e-3,
        schedule="constant",
        weight_decay=0.3,
        value_weight_decay=0.05,
        value_lr_multiplier=4.0,
        pre_value_lr_multiplier=0.5,
        retrieval_lr=2e-3,
        retrieval_weight_decay=0.2,
        clip_grad=0.0,
    ),
)
BACKBONES: tuple[dict[str, Any], ...] = (
    {"latent_attention": LatentAttentionConfig(latent_dim=HIDDEN, rotary_dim=2, query_latent_dim=12)},
    {"moe": MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=12)},
)
# Widths that fit them, in whichever family has the key, and so small that one more or less tells.
SIZES = {
    "num_keys": 6,
    "key_dim": 4,
    "value_dim": HIDDEN,
    "pre_value_dim": 6,
    "top_k": 4,
    "row_top_k_limit": 3,
    "num_heads": 4,
    "num_rows": 20,
    "num_slots": 2,
    "num_tables": 3,
    "vocab_size": VOCAB_SIZE + 3,
    "heads_per_order": 2,
    "rows_per_head": 20,
}
SIZES_OF = {"mome": {"value_dim": HIDDEN // 4, "gate_channels": 5}}
"""Other sizes, of families whose rows are as wide as a head."""
# What no walk over types could make up.
SECOND_VALUES: dict[str, tuple[Any, ...]] = {"placement.blocks": ((1,),), "placement.spans": ("0:1",)}
# Other values of other keys, which some keys are read beside alone.
BESIDE: tuple[dict[str, Any], ...] = (
    {"placement.position": "inserted", "placement.blocks": (1,)},
    {"pre_value_dim": 0, "placement.position": "inserted", "placement.blocks": (1,)},
    {"sharing.pattern": "ring", "sharing.group": 3},
    {"key_balance_weight": 0.5},
    {"tucker_penalty_weight": 0.5},
    {"key_expansion": 2},
    {"value_projection": True},
    {"address": NgramAddressConfig(max_order=3, num_rows=20), "vocab_size": None},
    {"address": NgramAddressConfig(rules="polynomial", num_rows=20), "vocab_size": None},
    {"address": NgramAddressConfig(max_order=3, heads_per_order=2, num_rows=20), "vocab_size": None, "value_dim": 1},
    {"address": NgramAddressConfig(num_rows=20, signs="ids", num_sign_patterns=9), "vocab_size": None},
    {"address": None, "vocab_size": VOCAB_SIZE + 3},
)
UNREAD = {
    "placement.every",
    "placement.blocks",
    "placement.position",
    "placement.spans",
    "placement.query_group",
    "placement.norm",
    "value_dim",
    "num_heads",
    "compressed_vocab_size",
    "vocab_size",
}
"""Keys that some families refuse or do not read: they have a slot or a block of their own, the backbone's widths, no file, or addresses that
are no ids."""


def models_of(kind: str) -> list[RunConfig]:
    """Models of a family on every backbone, and with other values of other keys, as far as it allows them."""
    names = {item.name for item in fields(FAMILIES[kind].config)}
    memory: MemoryConfig = FAMILIES[kind].config(
        **{name: size for name, size in (SIZES | SIZES_OF.get(kind, {})).items() if name in names}
    )
    if getattr(memory, "address", None) is not None:
        memory = set_key(memory, "vocab_size", None)
    found = [replace(DENSE, model=replace(DENSE.model, memory=memory))]
    for backbone in BACKBONES:
        with suppress(ValueError):
            found.append(replace(found[0], model=replace(found[0].model, **backbone)))
    for beside in BESIDE:
        with suppress(ValueError, TypeError, AttributeError):
            found.append(
                reduce(lambda model, key: set_key(model, f"model.memory.{key}", beside[key]), beside, found[0])
            )
    return found


def keys_of(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every key of a section and of those below it, and values that it does not have."""
    hints = typing.get_type_hints(type(section))
    for item in fields(section):
        value, key = getattr(section, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from keys_of(value, f"{key}.")
        elif key != "kind" and (values := SECOND_VALUES.get(key) or others(hints[item.name], value)):
            # Each of several choices is asked for by itself; of sizes, the first that the model may have.
            yield from ((key, (each,)) for each in values) if isinstance(value, str) else ((key, values),)


def others(hint: Any, value: Any) -> tuple[Any, ...]:
    """Values of a type besides one."""
    if typing.get_origin(hint) is Literal:
        return tuple(each for each in typing.get_args(hint) if each != value)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, float):
        return (2 * value or 0.5, value / 2)
    if isinstance(value, int):
        return (value + 1, value + 2, 2 * value, value // 2, value // 4)
    of_null = {int: (2, 6), float: (0.5,), bool: (True, False)}
    return tuple(other for kind in typing.get_args(hint) for other in of_null.get(kind, ()))


def changed(base: RunConfig, key: str, values: Iterable[Any]) -> Iterator[RunConfig]:
    """The model with another value of a key, for each that it may have."""
    for value in values:
        try:
            found = set_key(base, key, value)
        except (ValueError, TypeError):
            continue
        if found != base:
            yield found


def is_read(key: str, model: RunConfig) -> bool:
    """True if that key has an effect in this model, and no other is set that has none."""
    unread = ineffective_fields(model)
    return all(item.at_default and item.key != key for item in unread if item.key.startswith("model.memory."))


class Norms(TorchDispatchMode):
    """Sees what is added before a root is taken, wherever that is.

    Attributes:
        epsilons: one per call of a norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epsilons: list[float] = []
        self._sums: dict[int, tuple[Tensor, float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, aten = func(*args, **(kwargs or {})), torch.ops.aten
        if func in (aten.add.Tensor, aten.add_.Tensor) and isinstance(args[1], float):
            # Kept, as a number of an object is another's once that is gone.
            self._sums[id(out)] = (out, args[1])
        elif func is aten.rsqrt.default:
            self.epsilons.append(self._sums.get(id(args[0]), (None, 0.0))[1])
        elif func is aten.native_layer_norm.default:
            self.epsilons.append(args[4])
        elif func is aten._fused_rms_norm.default:
            self.epsilons.append(args[3])
        return out


class Reads(LayerUsage):
    """Keeps what a layer tells of its reads.

    Attributes:
        rows: rows of the bank.
        problems: arguments that are none.
    """

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.problems: list[str] = []

    def record(self, rows: Tensor, scores: Tensor | None, out: Tensor, router: Tensor | None = None) -> None:
        if rows.dtype not in (torch.int32, torch.int64) or len(rows) != len(out) or not out.is_floating_point():
            self.problems.append(f"reads rows {rows.dtype} {tuple(rows.shape)} for {out.dtype} {tuple(out.shape)}")
        # Of several cores the sum decides.
        if scores is not None and (scores.dim() != 4 or (scores.sum(3).diff(dim=2) > 1e-6).any()):
            self.problems.append("its scores are not those of entries, the best first")
        if router is not None and not torch.allclose(router.sum(1), torch.ones(len(rows))):
            self.problems.append("its router's weights do not add up to 1")
        self.rows.update(rows.flatten().tolist())


@dataclass
class Step:
    """The first step of a model.

    Attributes:
        gradients: by parameter.
        epsilons: epsilons of the norms, in the order of their calls.
        problems: parameters that are in another group than their kind says, get no gradient, or move elsewhere.
        misread: statements of layers on their reads that are not so.
    """

    gradients: dict[str, Tensor]
    epsilons: list[float]
    problems: list[str] = field(default_factory=list)
    misread: list[str] = field(default_factory=list)


def group_by_name(name: str) -> str:
    """Optimizer group by what a parameter is called, which the product never asks."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if name.startswith("banks."):
        return leaf
    if ".experts." in name:
        return "experts"
    if any(word in leaf for word in ("norm", "gain", "bias")):
        return "backbone_no_decay"
    return "retrieval" if ".memory." in name else "backbone"


def first_step(config: RunConfig, groups: ParallelGroups) -> Step:
    """Take it, and hold it to AdamW with moments of one gradient: lr g / (|g| + eps) after a decay of lr wd."""
    with torch.enable_grad():
        run = build(config, groups)
        (bare,) = run.bare
        begins_empty = not all(table.any() for bank in bare.own_banks for table in bank.parameters())
        before = {name: p.detach().double() for name, p in bare.named_parameters()}
        reads = [Reads() for _ in bare.memory_layers]
        for layer, told in zip(bare.memory_layers, reads, strict=True):
            layer.usage = told
        with Norms() as norms:
            run.train(1)
    step = Step({name: p.main_grad.detach().clone() for name, p in bare.named_parameters()}, norms.epsilons)
    rows: dict[int, set[int]] = {}
    for layer, told in zip(bare.memory_layers, reads, strict=True):
        step.misread += [f"{layer.name}: {problem}" for problem in told.problems]
        rows.setdefault(layer.view.bank, set()).update(told.rows)
    for bank, told_rows in rows.items():
        learnt = set(step.gradients[f"banks.{bank}.values"].any(1).nonzero().flatten().tolist())
        # Weights of zero read, and teach nothing.
        if not learnt <= told_rows or len(learnt) < len(told_rows) / 2:
            step.misread.append(f"bank {bank}: rows {sorted(told_rows)} are told, and {sorted(learnt)} learn")
    settings = group_settings(0, config.optimizer, config.train)
    for name, parameter in bare.named_parameters():
        group, gradient = group_of(name, parameter), step.gradients[name].double()
        lr, decay = settings[group]
        expected = before[name] * (1 - lr * decay) - lr * gradient / (gradient.abs() + config.optimizer.epsilon)
        if group != group_by_name(name):
            step.problems.append(f"{name} is in {group}")
        # Before weights of zeros nothing learns in a first step, nor does an expert without tokens.
        behind = before.get(name.removesuffix("_gain"), gradient + 1)
        if not gradient.any() and not begins_empty and group != "experts" and behind.any():
            step.problems.append(f"{name} gets no gradient")
        if not torch.allclose(parameter.detach().double(), expected, rtol=1e-5, atol=lr * 1e-4):
            step.problems.append(f"{name} moves elsewhere")
    return step


@dataclass
class Asked:
    """Answers about a family.

    Attributes:
        unread: keys, and values with which no model reads them.
        untold: keys, and values that make no difference.
        steps: one of every set of parameters.
        miscounted: by the formula and as built, where these differ.
        misdeclared: models whose hidden matrices are others than the formulas list.
        unswitched: models that a switched-off memory leaves as they were, or that its tables still reach.
    """

    unread: list[tuple[str, Any]] = field(default_factory=list)
    untold: list[tuple[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    miscounted: list[tuple[int, int]] = field(default_factory=list)
    misdeclared: list[RunConfig] = field(default_factory=list)
    unswitched: list[RunConfig] = field(default_factory=list)


def fill_empty_tables(chunk: MemoryGPTModel) -> None:
    """Give tables that begin as zeros something to tell."""
    generator = torch.Generator().manual_seed(1)
    for table in (table for bank in chunk.own_banks for table in bank.parameters()):
        if not table.any():
            with torch.no_grad():
                table.normal_(generator=generator)


@torch.no_grad()
def logits_of(chunk: MemoryGPTModel) -> Tensor:
    ids = torch.arange(16).view(2, 8) % 11
    logits: Tensor = chunk(ids, torch.arange(8).expand(2, -1), None)
    return logits


def obeys_switch(chunk: MemoryGPTModel) -> bool:
    """True if the memory counts, and nothing of its tables once it is off."""
    tables = [table for bank in chunk.own_banks for table in bank.parameters()]
    kept = [table.detach().clone() for table in tables]
    read = logits_of(chunk)
    chunk.set_memory_enabled(False)
    unread = logits_of(chunk)
    with torch.no_grad():
        for table in tables:
            table.neg_().add_(1)
    still_unread = logits_of(chunk)
    chunk.set_memory_enabled(True)
    with torch.no_grad():
        for table, weights in zip(tables, kept, strict=True):
            table.copy_(weights)
    return torch.equal(unread, still_unread) and not torch.equal(read, unread)


def ask(kind: str, groups: ParallelGroups) -> Asked:
    asked, bases = Asked(), models_of(kind)

    @cache
    def built(config: RunConfig) -> MemoryGPTModel:
        (chunk,) = build_chunks(config, groups, vocab_size=VOCAB_SIZE)
        fill_empty_tables(chunk)
        counts = count_parameters(config.model).total, sum(p.numel() for p in chunk.parameters())
        if len(set(counts)) > 1:
            asked.miscounted.append(counts)
        (stage,) = stages_of(config)
        hidden = [ReplicaRanges(p, 0, ()) for p in chunk.parameters() if matrices_of(p) is not None]
        declared = [shape for unit in units_of(hidden, 1) for shape in unit.matrix_shapes]
        if Counter(stage.trained.matrices.all) != Counter(declared):
            asked.misdeclared.append(config)
        return chunk

    @cache
    def weights(config: RunConfig) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in (*built(config).named_parameters(), *built(config).named_buffers())}

    @cache
    def outputs(config: RunConfig) -> dict[str, Tensor]:
        return {"logits": logits_of(built(config))}

    @cache
    def step(config: RunConfig) -> Step:
        return first_step(config, groups)

    def gradients(config: RunConfig) -> dict[str, Tensor]:
        return step(config).gradients

    def differ(one: RunConfig, other: RunConfig) -> bool:
        for measured in (weights, outputs, gradients):
            first, second = measured(one), measured(other)
            if first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
                return True
        return False

    kinds = {tuple(weights(base)): base for base in reversed(bases)}
    for key, values in keys_of(bases[0].model.memory):
        of_key = f"model.memory.{key}"
        models = ((base, model) for base in bases for model in changed(base, of_key, values))
        is_read_anywhere = False
        for base, model in models:
            if is_read(of_key, model):
                is_read_anywhere = True
                kinds.setdefault(tuple(weights(model)), model)
                if differ(base, model):
                    break
        else:
            (asked.untold if is_read_anywhere else asked.unread).append((key, values))
    asked.steps = [step(model) for model in kinds.values()]
    asked.unswitched = [model for model in kinds.values() if not obeys_switch(built(model))]
    return asked


@pytest.fixture(scope="module")
def asked(run_ranks: Any) -> dict[str, Asked]:
    def main() -> dict[str, Asked]:
        with joined(DENSE) as groups:
            return {kind: ask(kind, groups) for kind in KINDS}

    found: dict[str, Asked] = run_ranks(main, 1, timeout_s=500)[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_tells(asked: dict[str, Asked], kind: str) -> None:
    """Another value makes other weights, other outputs, or other gradients."""
    assert asked[kind].untold == []
    assert {key for key, _ in asked[kind].unread} <= UNREAD


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_can_be_switched_off(asked: dict[str, Asked], kind: str) -> None:
    assert asked[kind].unswitched == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_norm_adds_the_configured_epsilon(asked: dict[str, Asked], kind: str) -> None:
    assert all(set(step.epsilons) == {EPSILON} for step in asked[kind].steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_takes_the_step_of_its_group(asked: dict[str, Asked], kind: str) -> None:
    assert [problem for step in asked[kind].steps for problem in step.problems] == []


@pytest.mark.parametrize("kind", KINDS)
def test_layers_tell_which_rows_they_read(asked: dict[str, Asked], kind: str) -> None:
    assert [problem for step in asked[kind].steps for problem in step.misread] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_counts_every_parameter(asked: dict[str, Asked], kind: str) -> None:
    assert asked[kind].miscounted == []
    assert asked[kind].misdeclared == []
