"""The table of what each configuration key does: entries, and the models and runs that they measure.

An entry is a function of two subjects that differ in one key. It states what that changes, as a number or a shape that
can be written down without the code in question, and what it leaves alone.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tiny_runs import VOCAB_SIZE, TinyRun, build
from torch import Tensor

from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig, MoEConfig
from megamem.families.registry import FAMILIES
from megamem.families.ultramem_v2.config import UltraMemV2Config
from megamem.layers.layer import MemoryLayer
from megamem.model import MemoryGPTModel
from parallel.groups import ParallelGroups
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.schema import RunConfig, TrainConfig

MEMORY = UltraMemV2Config(num_keys=12, key_dim=6, value_dim=16, pre_value_dim=10, top_k=4)

BASE = RunConfig(
    model=ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size_multiple=16, memory=MEMORY
    ),
    train=TrainConfig(num_steps=3, global_batch_size=4, micro_batch_size=2, sequence_length=8, kernels="torch"),
    optimizer=OptimizerConfig(lr=2e-3, schedule="constant", clip_grad=0.0),
)
"""No two widths are alike, so that a key cannot be taken for its neighbour."""


def with_memory(**fields: Any) -> RunConfig:
    """The base with another memory, of the same family."""
    return with_model(memory=replace(MEMORY, **fields))


def with_kind(kind: str, **fields: Any) -> RunConfig:
    """The base with a memory of another family."""
    return with_model(memory=as_kind(MEMORY, kind, **fields))


def as_kind(memory: MemoryConfig, kind: str, **fields: Any) -> MemoryConfig:
    """A memory of another family, with the values of the keys that both have."""
    family = FAMILIES[kind]
    names = {item.name for item in dataclasses.fields(family.config)} - {"kind"}
    both = {name: getattr(memory, name) for name in names if hasattr(memory, name)}
    config: MemoryConfig = family.config(**both | fields)
    return config


def with_model(**fields: Any) -> RunConfig:
    """The base with another model."""
    return replace(BASE, model=replace(BASE.model, **fields))


def with_optimizer(**fields: Any) -> RunConfig:
    """The base with another optimizer."""
    return replace(BASE, optimizer=replace(BASE.optimizer, **fields))


PKM = with_kind("pkm", value_dim=32)
MOE = with_model(
    memory=None,
    ffn_hidden_size=ModelConfig.ffn_hidden_size,
    moe=MoEConfig(num_experts=6, top_k=2, expert_ffn_hidden_size=20, balance_loss_weight=0.0, z_loss_weight=0.0),
)


@dataclass(frozen=True)
class Entry:
    """Effect of one key.

    Attributes:
        key: dotted; `data.datasets.0.path` stands for every element of its list.
        value: the second value.
        base: the configuration with the first one.
        check: states what differs between (base, second) and what does not.
    """

    key: str
    value: Any
    base: RunConfig
    check: Callable[[Any, Any], None]

    @property
    def name(self) -> str:
        """Name of the case; a key may have several."""
        return f"{self.key}={self.value}" if isinstance(self.value, str | int | float) else self.key

    @property
    def second(self) -> RunConfig:
        """The base with the second value."""
        changed = set_key(self.base, self.key, self.value)
        assert isinstance(changed, RunConfig)
        assert changed != self.base, f"{self.key} is {self.value!r} in the base already"
        return changed


class Table:
    """Entries that are measured in one way."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def key(self, key: str, value: Any, base: RunConfig = BASE) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Enters the function it decorates."""

        def enter(check: Callable[..., None]) -> Callable[..., None]:
            self.entries.append(Entry(key, value, base, check))
            return check

        return enter


def set_key(owner: Any, key: str, value: Any) -> Any:
    """A copy of a configuration, or of a list in it, with one value changed."""
    name, _, rest = key.partition(".")
    if isinstance(owner, tuple):
        index = int(name)
        changed = set_key(owner[index], rest, value) if rest else value
        return (*owner[:index], changed, *owner[index + 1 :])
    if key == "kind" and isinstance(owner, MemoryConfig):
        return as_kind(owner, value)
    return replace(owner, **{name: set_key(getattr(owner, name), rest, value) if rest else value})


def schema_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key that has a value of its own, by dataclass fields; an optional section is one (it may be null), and
    element N of a list.
    """
    of = [family.config for family in FAMILIES.values()] if cls is MemoryConfig else [cls]
    fields = {item.name: (owner, item) for owner in of for item in dataclasses.fields(owner)}
    for owner, item in fields.values():
        hint = typing.get_type_hints(owner)[item.name]
        members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        sections = [member for member in members if dataclasses.is_dataclass(member)]
        elements = [
            a for a in typing.get_args(hint) if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(a)
        ]
        if not sections or len(members) > 1:
            yield f"{prefix}{item.name}"
        # The keys of a second memory are those of the first.
        for section in sections if item.name != "second_memory" else ():
            yield from schema_keys(typing.cast(type, section), f"{prefix}{item.name}.")
        for element in elements:
            yield from schema_keys(element, f"{prefix}{item.name}.N.")


@dataclass(frozen=True)
class Step:
    """One optimizer step of a tiny run.

    Attributes:
        loss: nats per target.
        norm: norm of the gradients before clipping.
        gradients: by parameter that has a dense one, after clipping.
        weights: by parameter, after the update.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Steps:
    """Three of them, one after the other, each of which is taken when it is first asked for."""

    def __init__(self, build: Callable[[], TinyRun]) -> None:
        self._build = build
        self._run: TinyRun | None = None
        self._taken: list[Step] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Step:
        number += len(self) if number < 0 else 0
        if number >= len(self):
            raise IndexError
        if self._run is None:
            self._run = self._build()
        (model,) = self._run.bare
        while len(self._taken) <= number:
            ((loss, norm),) = self._run.train(1)
            self._taken.append(
                Step(
                    loss,
                    norm,
                    {name: p.main_grad.clone() for name, p in model.named_parameters() if hasattr(p, "main_grad")},
                    {name: p.detach().clone() for name, p in model.named_parameters()},
                )
            )
        return self._taken[number]

    def __iter__(self) -> Iterator[Step]:
        return (self[number] for number in range(len(self)))


class Subject:
    """A tiny model on one rank, and what can be measured of it. Trained weights are copies: `model` keeps the initial
    ones.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups

    @property
    def memory(self) -> MemoryConfig:
        assert self.config.model.memory is not None
        return self.config.model.memory

    def build(self) -> TinyRun:
        """A run of its own, to train."""
        with torch.enable_grad():
            return build(self.config, self.groups)

    @cached_property
    def run(self) -> TinyRun:
        """A run that is never trained."""
        return self.build()

    @property
    def model(self) -> MemoryGPTModel:
        (model,) = self.run.bare
        return model

    @property
    def layer(self) -> MemoryLayer:
        """The first memory layer."""
        return self.model.memory_layers[0]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Initial weights by name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.weights.items()}

    @property
    def memory_weights(self) -> dict[str, Tensor]:
        """Weights of the first memory layer, by their own names."""
        return {name: p.detach() for name, p in self.layer.named_parameters()}

    @cached_property
    def tokens(self) -> Tensor:
        """[b, s], the same for every subject of one size."""
        train = self.config.train
        generator = torch.Generator().manual_seed(3)
        return torch.randint(0, VOCAB_SIZE, (train.micro_batch_size, train.sequence_length), generator=generator)

    def logits(self, model: MemoryGPTModel | None = None) -> Tensor:
        """[b, s, ids] of `tokens`, from the initial weights."""
        positions = torch.arange(self.tokens.shape[1]).expand(self.tokens.shape[0], -1)
        with torch.no_grad():
            out: Tensor = (model or self.model)(self.tokens, positions, None)
        return out[..., :VOCAB_SIZE]

    @cached_property
    def hidden(self) -> Tensor:
        """Some normalised input of a memory, [T, D]."""
        generator = torch.Generator().manual_seed(5)
        return torch.randn(7, self.config.model.hidden_size, generator=generator)

    @cached_property
    def steps(self) -> Steps:
        """Steps on the same samples for every subject of one batch."""
        return Steps(self.build)


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x over its root mean square, without a gain."""
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal to the rounding of a few operations."""
    return bool(torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-6))


def changed_names(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """Names that both have and whose tensors differ in a bit."""
    return {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}


def last_parts(names: Sequence[str] | set[str]) -> set[str]:
    """The names without the path, and without `weight`."""
    return {name.removesuffix(".weight").rpartition(".")[2] for name in names}


def root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))
