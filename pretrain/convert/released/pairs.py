"""The public codes' checkpoints: where the elements of our tensors are in them, both ways.

UltraMemV2's release (OLMo), which also has UltraMem and Memory+, holds whole models; of Meta's (lingua) the memory
layers are known. `megamem.releases.names` translates the same names one way, tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megamem.banks.shuffle import KeyedShuffle
from megamem.config.memory import Table
from megamem.config.model import ModelConfig
from megamem.families.registry import family_of
from megamem.releases.names import BLOCK_NAMES, MODEL_NAMES, from_meta, from_released, names_of
from megamem.releases.release import META_RELEASE, ULTRAMEMV2_RELEASE, ReleasedNames
from megamem.retrieval.config import TuckerConfig
from pretrain.checkpoint.store.paired import PairedReader
from pretrain.checkpoint.store.tensors import Pair, Region, TensorInfo, TensorReader, inverted
from pretrain.errors import CheckpointError, ConfigError

_PREFIX = "transformer."
_PERMUTATION = "permutation"


def released_pairs(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], release: str) -> list[Pair]:
    """All elements of tensors of ours, and where they are in a release.

    A table that layers share is in a release of tables per layer once for each of them.

    Args:
        model: the model's config.
        shapes: shapes of our tensors, by global name.
        release: `ULTRAMEMV2_RELEASE` or `META_RELEASE`; the latter's pairs are those of memory layers alone.

    Raises:
        ConfigError: the release has no such model.
    """
    memory = model.memory
    released = release in family_of(memory).released if memory is not None else release == ULTRAMEMV2_RELEASE
    if model.latent_attention is not None:
        raise ConfigError(f"the release {release} has no models with latent attention: use the native format")
    if model.residual_streams is not None:
        raise ConfigError(f"the release {release} has no models with several residual streams: use the native format")
    if any(span.queried is not None for span in model.memory_spans):
        raise ConfigError(
            f"the release {release} has no memories that read with an earlier block's stream "
            "(model.memory.placement.query_group): use the native format, or huggingface"
        )
    if not released or model.moe is not None:
        kind = (
            "model.moe" if model.moe is not None else f"memory of kind {memory.kind if memory is not None else 'none'}"
        )
        raise ConfigError(f"the release {release} has no models with {kind}: use the native format, or huggingface")
    names = names_of(model, release)
    every = [pair for name, shape in shapes.items() for pair in _pairs(name, shape, model, names, release)]
    unknown = set(shapes) - {pair.ours.name for pair in every} if release == ULTRAMEMV2_RELEASE else set()
    if unknown:
        raise ConfigError(f"the release {release} has no {min(unknown)}")
    return every


def _pairs(name: str, shape: tuple[int, ...], model: ModelConfig, names: ReleasedNames, release: str) -> Iterator[Pair]:
    whole = TensorInfo(shape, torch.float32).whole(name)
    match name.split("."):
        case ["banks", bank, table]:
            yield from _of_table(whole, int(bank), table, model, names, release)
        case ["decoder", "layers", *_] if (found := _memory_layer(name, model)) is not None:
            layer, parameter = found
            yield from _of_memory(whole, layer, parameter, model, names, release)
        case _ if release == META_RELEASE:
            return
        case ["decoder", "layers", block, *part] if (theirs := _BLOCKS.get(_outside_slot(part))) is not None:
            start = f"{_PREFIX}blocks.{block}.{theirs}"
            if theirs == "att_proj.weight":
                yield from _attention(whole, start, model)
            elif theirs == "ff_proj.weight":
                # Rows are [up; gate] there, [gate; up] here.
                half = (shape[0] // 2, *shape[1:])
                yield Pair(Region(name, (0, 0), half), Region(start, (half[0], 0), half))
                yield Pair(Region(name, (half[0], 0), half), Region(start, (0, 0), half))
            else:
                yield _renamed(whole, start)
        case _ if (theirs := _MODELS.get(name)) is not None:
            yield _renamed(whole, f"{_PREFIX}{theirs}")


_BLOCKS = {ours: theirs for theirs, ours in BLOCK_NAMES.items()}
_MODELS = {ours: theirs for theirs, ours in MODEL_NAMES.items()}


def _outside_slot(part: list[str]) -> str:
    """A block's parameter without the module that holds the feed-forward."""
    return re.sub(r"^mlp\.(ffn\.)?", "", ".".join(part))


def _renamed(ours: Region, theirs: str, shape: tuple[int, ...] | None = None) -> Pair:
    shape = ours.shape if shape is None else shape
    return Pair(ours, Region(theirs, (0,) * len(shape), shape))


def _memory_layer(name: str, model: ModelConfig) -> tuple[int, str] | None:
    """Memory layer that a parameter belongs to, and its name there; None: it belongs to none."""
    for layer in range(model.num_memory_layers):
        prefix = f"{model.memory_name(layer)}."
        if name.startswith(prefix):
            return layer, name.removeprefix(prefix)
    return None


def _of_memory(
    ours: Region, layer: int, parameter: str, model: ModelConfig, names: ReleasedNames, release: str
) -> Iterator[Pair]:
    prefix = _layer_prefix(layer, model, release)
    for theirs, stacked in names.stacked.items():
        if stacked == parameter:
            # One tensor there for each index of our first dimension.
            for number in range(ours.shape[0]):
                part = ours.shifted((number, *(0,) * (len(ours.shape) - 1)), (1, *ours.shape[1:]))
                yield _renamed(part, f"{prefix}{theirs}.{number}", ours.shape[1:])
    for theirs, plain in names.parameters.items():
        if plain == parameter:
            yield _renamed(ours, f"{prefix}{theirs}", names.shape(parameter, ours.shape))


def _layer_prefix(layer: int, model: ModelConfig, release: str) -> str:
    if release == META_RELEASE:
        return f"layers.{model.memory_spans[layer].read}.feed_forward."
    return f"{_PREFIX}mem_blocks.{layer}."


def _of_table(
    ours: Region, bank: int, table: str, model: ModelConfig, names: ReleasedNames, release: str
) -> Iterator[Pair]:
    plan = model.memory_plan
    for theirs, plain in names.tables.items():
        if plain != table:
            continue
        if names.tables_in == "model":
            first = sum(spec.num_rows for spec in plan.banks[:bank])
            yield Pair(ours, Region(f"{_PREFIX}full_memory_layer.{theirs}", (first, 0), ours.shape))
        else:
            for layer in plan.banks[bank].layers:
                yield _renamed(ours, f"{_layer_prefix(layer, model, release)}{theirs}")


def _attention(ours: Region, theirs: str, model: ModelConfig) -> Iterator[Pair]:
    """Rows are [q; k; v] of all heads there; here, per query group, its queries, its key and its value."""
    head, groups, columns = model.attention_head_dim, model.query_groups, ours.shape[1]
    per_group = model.num_attention_heads // groups * head
    queries, keys = groups * per_group, groups * head
    for group in range(groups):
        start = group * (per_group + 2 * head)
        for within, rows, there in (
            (0, per_group, group * per_group),
            (per_group, head, queries + group * head),
            (per_group + head, head, queries + keys + group * head),
        ):
            shape = (rows, columns)
            yield Pair(Region(ours.name, (start + within, 0), shape), Region(theirs, (there, 0), shape))


def as_ours(source: TensorReader, model: ModelConfig, release: str) -> PairedReader:
    """A release's checkpoint under our names.

    Args:
        source: tensors by released names.
        model: the config of the same model.
        release: `ULTRAMEMV2_RELEASE` or `META_RELEASE`.

    Raises:
        CheckpointError: the checkpoint has other tensors than the model.
        ConfigError: the release has no such model.
    """
    translate = from_meta if release == META_RELEASE else from_released
    shaped = {name: torch.empty(info.shape, device="meta") for name, info in source.tensors.items()}
    try:
        ours = translate(shaped, model)
    except (ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"the checkpoint is not one of this model in the release {release}: {error}") from error
    pairs = released_pairs(model, {name: tuple(tensor.shape) for name, tensor in ours.items()}, release)
    there = [pair for pair in pairs if pair.theirs.name in source.tensors]
    # Any copy will do of a table that layers share.
    filled = {pair.ours for pair in there}
    missing = {pair.ours.name for pair in pairs if pair.ours not in filled}
    if isinstance(model.memory, TuckerConfig):
        # They are numbered there: the last ones may be absent without a gap.
        cores = model.memory.num_cores
        missing |= {name for name, each in ours.items() if name.endswith(".memory.cores") and each.shape[0] < cores}
    if missing := missing | _missing(set(ours), model, release):
        listed = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(f"the checkpoint is not complete: it lacks {listed}, or a part of it")
    return PairedReader(there, source)


def _missing(found: set[str], model: ModelConfig, release: str) -> set[str]:
    """Names of ours that the found ones lack: what some blocks or memory layers have, all must have."""
    expected = {f"banks.{bank.index}.{table.name}" for bank in model.memory_plan.banks for table in _tables(model)}
    memories = [f"{model.memory_name(layer)}." for layer in range(model.num_memory_layers)]
    # Without a memory layer's keys nothing is said of it.
    expected |= _in_all(found, memories) or {f"{prefix}keys" for prefix in memories}
    if release == ULTRAMEMV2_RELEASE:
        backbone = {name for name in found if not name.startswith(tuple(memories))}
        blocks = [f"decoder.layers.{block}." for block in range(model.num_layers)]
        with_memory = {span.read for span in model.memory_spans}
        # A block's feed-forward stands in another module where it has a memory.
        for numbers in (with_memory, set(range(model.num_layers)) - with_memory):
            expected |= _in_all(backbone, [blocks[number] for number in numbers])
        expected |= {f"{prefix}self_attention.linear_qkv.weight" for prefix in blocks}
        expected |= set(_MODELS) - ({"output_layer.weight"} if model.tied_embeddings else set())
    return expected - found


def _tables(model: ModelConfig) -> tuple[Table, ...]:
    return model.memory.tables if model.memory is not None else ()


def _in_all(names: set[str], prefixes: list[str]) -> set[str]:
    """Names of what one of the prefixes has, for all of them."""
    parts = {name.removeprefix(prefix) for prefix in prefixes for name in names if name.startswith(prefix)}
    return {f"{prefix}{part}" for prefix in prefixes for part in parts}


def as_released(ours: TensorReader, model: ModelConfig, release: str, *, seed: int) -> PairedReader:
    """Weights of ours under a release's names.

    Args:
        ours: our tensors, by global name.
        model: the model's config.
        release: `ULTRAMEMV2_RELEASE` or `META_RELEASE`.
        seed: the run's, which keys the shuffles. The release stores them.

    Raises:
        ConfigError: the release has no such model.
    """
    whole = _WithPermutations(ours, model, seed)
    shapes = {name: info.shape for name, info in whole.tensors.items()}
    return PairedReader(inverted(released_pairs(model, shapes, release)), whole)


class _WithPermutations:
    """A model's weights, and its keyed shuffles as the permutations that a release stores."""

    def __init__(self, ours: TensorReader, model: ModelConfig, seed: int) -> None:
        self._ours = ours
        self._shuffles: dict[str, KeyedShuffle] = {}
        self._tensors = dict(ours.tensors)
        if isinstance(model.memory, TuckerConfig) and model.memory.shuffle == "keyed":
            for layer in range(model.num_memory_layers):
                name = model.memory_name(layer)
                if f"{name}.keys" not in ours.tensors:
                    raise CheckpointError(f"{name}.keys is missing")
                num_keys = ours.tensors[f"{name}.keys"].shape[2]
                self._shuffles[f"{name}.{_PERMUTATION}"] = KeyedShuffle(num_keys, seed=seed, name=name)
                self._tensors[f"{name}.{_PERMUTATION}"] = TensorInfo((num_keys**2,), torch.int64)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, region: Region) -> Tensor:
        shuffle = self._shuffles.get(region.name)
        if shuffle is None:
            return self._ours.read(region)
        (start,), (size,) = region.offset, region.shape
        return shuffle(torch.arange(start, start + size, dtype=torch.int64))
