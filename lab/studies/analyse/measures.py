"""Work of one rank for each analysis. The first one writes what was found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.analysis.deciles import Deciles, count_tokens, frequency_deciles
from megamem.config.memory import MemoryConfig
from megamem.config.model import ModelConfig
from megamem.placement.block_plan import inserted_blocks
from megamem.placement.placed import PlacedMemory
from parallel.machine.atomic_write import atomic_write
from pretrain.config.schema import RunConfig
from pretrain.data.blend import check_blend
from pretrain.run.folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from megamem.layers.layer import MemoryLayer
    from megamem.model import MemoryGPTModel
    from parallel.groups import ParallelGroups
    from pretrain.data.held_out import HeldOutDataset


@dataclass(frozen=True)
class Analysed:
    """One run, and what is asked of it.

    Attributes:
        file: path of the JSON file for what was found.
    """

    config: RunConfig
    folder: RunFolder
    checkpoint: Path
    deciles: Deciles
    args: argparse.Namespace
    file: Path


def deciles_of(config: RunConfig) -> Deciles:
    """The bins of a run's training data."""
    tokenizer = check_blend(config.read_data)
    return frequency_deciles(count_tokens(config.data.datasets, tokenizer.vocab_size), tokenizer)


def addressed_by_ngrams(memory: MemoryConfig) -> bool:
    """True if n-grams say which rows the layers of a family read."""
    return memory.ngrams(1) is not None


def weighs_slots(memory: MemoryConfig) -> bool:
    """True if every token weighs slots in the layers of a family."""
    return bool(memory.slot_names)


def of_families(model: ModelConfig, asked: Callable[[MemoryConfig], bool]) -> list[PlacedMemory]:
    """The memory layers of the first family of a model of which this is true."""
    family = next(filter(asked, model.memories), None)
    return [layer for layer in model.memory_layers if family is not None and layer.memory.kind == family.kind]


@contextmanager
def restored(
    run: Analysed, max_sequences: int | None = None
) -> Iterator[tuple[Sequence[MemoryGPTModel], HeldOutDataset, ParallelGroups]]:
    """The chunks of a run's model on this rank, and the held-out text, or its first `max_sequences` windows."""
    from pretrain.data.held_out import HeldOutDataset
    from pretrain.engine.session import session
    from pretrain.evaluation.restore import restore_model

    config = run.config
    with session(config) as groups:
        tokenizer = check_blend(config.evaluated)
        chunks = restore_model(config, run.checkpoint, tokenizer, groups)
        separate, length = config.data.documents == "separate", config.train.sequence_length
        held_out = HeldOutDataset(config.evaluated, length, max_sequences, separate_documents=separate)
        yield chunks, held_out, groups


def write_found(run: Analysed, groups: ParallelGroups, **found: Any) -> None:
    """Write what was found, on the first rank, into the analysis's file."""
    if groups.is_main:
        about = {"name": run.folder.path.resolve().name, "checkpoint": str(run.checkpoint)}
        text = json.dumps({**about, **found}, indent=1)
        try:
            with atomic_write(run.file) as stream:
                stream.write(f"{text}\n".encode())
        except OSError:
            # Measuring takes long.
            print(text, flush=True)
            raise


def measure_frequency(run: Analysed) -> None:
    """Losses by bin."""
    from lab.analysis.losses import losses_by_bin

    with restored(run) as (chunks, held_out, groups):
        *of_bins, others = losses_by_bin(chunks, held_out, run.deciles.bin_of, run.config, groups)
        bins = [
            {
                "bin": number,
                "types": run.deciles.num_types[number],
                "lowest_count": run.deciles.lowest[number],
                "highest_count": run.deciles.highest[number],
                "tokens": round(loss.num_tokens),
                "nats": loss.nats / loss.num_tokens if loss.num_tokens else None,
            }
            for number, loss in enumerate(of_bins)
        ]
        rest = {
            "tokens": round(others.num_tokens),
            "nats": others.nats / others.num_tokens if others.num_tokens else None,
        }
        write_found(run, groups, bins=bins, in_no_bin=rest)


def measure_layers(run: Analysed) -> None:
    """Losses without each memory layer."""
    from lab.analysis.losses import losses_without_layers

    with restored(run) as (chunks, held_out, groups):
        whole, *without = losses_without_layers(chunks, held_out, run.config, groups)
        layers = [
            {"block": layer.span.read, "family": layer.memory.kind, "nats": nats}
            for layer, nats in zip(run.config.model.memory_layers, without, strict=True)
        ]
        write_found(run, groups, nats=whole, layers=layers)


def measure_routing(run: Analysed) -> None:
    """Mean weights by layer, bin and slot."""
    from lab.analysis.routing import mean_weights

    placed = of_families(run.config.model, weighs_slots)
    slots = placed[0].memory.slot_names
    with restored(run) as ((model,), held_out, groups):
        weights, tokens = mean_weights(
            model,
            _built(model, placed),
            held_out,
            run.deciles.bin_of,
            groups,
            num_slots=len(slots),
            micro_batch_size=run.config.train.micro_batch_size,
        )
        blocks = [layer.span.read for layer in placed]
        of_layers = [
            {
                "block": block,
                "by_bin": [row if tokens[number] else None for number, row in enumerate(of_layer.tolist())],
                "mean": (of_layer.nan_to_num() * tokens[:, None] / tokens.sum()).sum(0).tolist(),
            }
            for block, of_layer in zip(blocks, weights, strict=True)
        ]
        write_found(run, groups, slots=slots, tokens_by_bin=tokens.tolist(), layers=of_layers)


def measure_collapse(run: Analysed) -> None:
    """Distances by category and layer."""
    from lab.analysis.collapse import distances, drawn_pairs, named_pairs

    with restored(run) as ((model,), held_out, groups):
        args, tokenizer = run.args, held_out.tokenizer
        pairs: Mapping[str, Sequence[tuple[int, int]]]
        if args.pairs is None:
            pairs = drawn_pairs(run.deciles, tokenizer, args.num_pairs, args.seed)
        else:
            pairs = {"named": named_pairs(args.pairs.split(","), tokenizer)}
        found = distances(
            model, pairs, held_out, groups, num_contexts=args.contexts, context_tokens=args.context_tokens
        )
        categories = {
            name: {
                "pairs": [[tokenizer.detokenize([one]) for one in pair] for pair in pairs[name]],
                "distance": distance,
                "relative": relative,
            }
            for name, (distance, relative) in found.items()
        }
        write_found(run, groups, contexts=args.contexts, categories=categories)


def measure_heads(run: Analysed) -> None:
    """Importance of heads by block, with both readings of the loss, and how it varies within a block."""
    from lab.analysis.heads import READINGS, head_importance

    with restored(run) as ((model,), held_out, groups):
        found = head_importance(model, held_out, groups, micro_batch_size=run.config.train.micro_batch_size)
        inserted = list(inserted_blocks(run.config.model))
        of_readings = {
            reading: {
                "scores": scores.tolist(),
                "variance_of_heads": scores.var(1, correction=0).tolist(),
                "sample_variance_of_heads": scores.var(1, correction=1).tolist() if scores.shape[1] > 1 else None,
            }
            for reading, scores in zip(READINGS, found.scores, strict=True)
        }
        write_found(run, groups, nll=run.args.nll, examples=found.num_examples, inserted=inserted, readings=of_readings)


def measure_ngrams(run: Analysed) -> None:
    """Hits and collisions by layer and order, gates by how often an n-gram comes, and losses with rows of others."""
    from lab.analysis.ngrams import (
        COUNT_STEPS,
        counted_ngrams,
        gates_by_count,
        loads_of,
        sampled_streams,
        shuffled_addresses,
    )
    from pretrain.evaluation.evaluate import evaluate

    model_config, size = run.config.model, run.config.train.micro_batch_size
    placed = of_families(model_config, addressed_by_ngrams)
    ngrams = placed[0].memory.ngrams(len(placed))
    assert ngrams is not None
    with restored(run) as ((model,), held_out, groups):
        layers = _built(model, placed)
        streams = sampled_streams(run.config.data.datasets, run.args.tokens)
        loads: list[list[dict[str, Any]]] = [[] for _ in layers]
        for order in range(2, ngrams.max_order + 1):
            counted = counted_ngrams(streams, layers[0], order)
            for of_layer, load in zip(loads, loads_of(layers, ngrams, counted), strict=True):
                of_layer.append({"order": order, **asdict(load)})
        gates, tokens = gates_by_count(model, layers, held_out, counted, groups, micro_batch_size=size)

        def nats() -> float:
            return evaluate([model], held_out, groups, micro_batch_size=size, pipeline=1).loss

        losses = {"nats": nats()}
        with shuffled_addresses(layers):
            shuffled, _ = gates_by_count(model, layers, held_out, counted, groups, micro_batch_size=size)
            losses["nats_shuffled"] = nats()
        of_layers = [
            {"block": layer.span.read, "orders": orders, "gates": _known(own), "gates_shuffled": _known(others)}
            for layer, orders, own, others in zip(placed, loads, gates, shuffled, strict=True)
        ]
        sampled = sum(map(len, streams))
        write_found(
            run, groups, sampled=sampled, counts=COUNT_STEPS, tokens=tokens.tolist(), layers=of_layers, **losses
        )


def _built(model: MemoryGPTModel, placed: Sequence[PlacedMemory]) -> list[MemoryLayer]:
    """The layers of a whole model that are these."""
    names = {layer.name for layer in placed}
    return [layer for layer in model.memory_layers if layer.name in names]


def _known(values: Tensor) -> list[float | None]:
    """Numbers, and None where there is none."""
    return [None if value != value else value for value in values.tolist()]


MEASURES: Mapping[str, Callable[[Analysed], None]] = {
    "frequency": measure_frequency,
    "layer-drop": measure_layers,
    "routing": measure_routing,
    "collapse": measure_collapse,
    "heads": measure_heads,
    "ngrams": measure_ngrams,
}
