"""Facts that follow from a configuration, which are shown below it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from megamem.config.model import ModelConfig
from megamem.retrieval.initial import paper_ffn_variance, swiglu_ffn_variance
from parallel.pipeline_layout import ModelChunk, chunks_of_stage, model_chunks
from pretrain.config.context_ways import WAYS, context_way, heads_problem, run_costs
from pretrain.config.position import tokens_of_run
from pretrain.config.schema import RunConfig
from pretrain.config.settled import settled
from pretrain.config.sized import Filled
from pretrain.config.table_gradients import chosen
from pretrain.config.updates import GRADIENT_BYTES, held_table_gradient_bytes
from pretrain.errors import ConfigError
from pretrain.planning.bytes.state import dense_state, matrix_saving, table_state
from pretrain.planning.counts.formulas import count_parameters, forward_flops_per_token
from pretrain.printable import printable


@dataclass(frozen=True)
class ConfigSection:
    """Facts that follow from a configuration, printed below it as YAML comments."""

    title: str
    lines: tuple[str, ...]


def extra_sections(config: RunConfig, measured_layers: int = 0) -> list[ConfigSection]:
    """Figures of a configuration to show besides its keys.

    Args:
        config: a configuration of any kind.
        measured_layers: memory layers that are built to measure their initial outputs.
    """
    sections = [_length_section(config), _model_section(config), _bytes_section(settled(config))]
    if (choice := chosen(config)) is not None:
        sections.append(ConfigSection("choices", (choice.text,)))
    if config.model.memory is not None:
        lines = [_feed_forward_line(config.model)]
        if measured_layers:
            lines += _measured_lines(config.model, config.seed, measured_layers)
        else:
            lines.append("memory: not measured; --layers 4 builds that many of its layers and measures them")
        sections.append(ConfigSection(f"initialisation ({config.model.memory.initialised_by})", tuple(lines)))
    if config.parallel.pipeline_layout is not None:
        sections.append(_pipeline_section(config))
    if config.parallel.context > 1:
        sections.append(_context_section(config))
    return sections


def size_section(filled: Filled) -> ConfigSection:
    """Keys that followed from the size of a configuration, and those that would have but were set."""
    lines = [
        f"{key}: {value:g}" if isinstance(value, float) else f"{key}: {value}" for key, value in filled.keys.items()
    ]
    lines += [f"{key}: as set ({printable(node.origin)})" for key, node in filled.kept.items()]
    return ConfigSection(f"from model.size {filled.text} ({printable(filled.origin)})", tuple(lines))


def _context_section(config: RunConfig) -> ConfigSection:
    """Bytes that the ways of attention send and keep, and the way that the run takes."""
    taken, lines = context_way(config), []
    for way in WAYS:
        problem = heads_problem(config) if way == "heads" else None
        costs = run_costs(config, way)
        text = (
            f"{costs.forward / 1e6:,.2f} MB sent forward, {costs.backward / 1e6:,.2f} MB backward, "
            f"{costs.kept / 1e6:,.2f} MB kept"
        )
        lines.append(f"{way}{' (taken)' if way == taken else ''}: {problem or text}")
    return ConfigSection("attention across cut sequences (a rank, per layer and microbatch)", tuple(lines))


def _pipeline_section(config: RunConfig) -> ConfigSection:
    """Blocks of every pipeline stage."""
    parallel = config.parallel
    try:
        chunks = model_chunks(
            config.model.num_layers,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            layout=parallel.pipeline_layout,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lines = []
    for stage in range(parallel.pipeline):
        held = chunks_of_stage(chunks, pipeline=parallel.pipeline, pipeline_rank=stage)
        lines.append(f"stage {stage}: {'; '.join(map(_chunk_text, held))}")
    return ConfigSection("pipeline (blocks count from 0)", tuple(lines))


def _chunk_text(chunk: ModelChunk) -> str:
    layers = chunk.layers
    blocks = f"block {layers.start}" if len(layers) == 1 else f"blocks {layers.start}..{layers.stop - 1}"
    parts = ["embedding"] * chunk.has_embedding + [blocks] * bool(layers) + ["loss"] * chunk.has_loss
    return ", ".join(parts)


def _length_section(config: RunConfig) -> ConfigSection:
    train, stage = config.train, config.stage
    step_tokens = train.tokens_per_step
    in_all = tokens_of_run(train, stage, train.num_steps) - (0 if stage is None else stage.tokens_before)
    return ConfigSection("length", (f"tokens per step: {step_tokens:,}", f"tokens in all: {in_all:,}"))


def _model_section(config: RunConfig) -> ConfigSection:
    """Parameters, operations and table reads by the closed formulas."""
    model, train = config.model, config.train
    counts = count_parameters(model)
    lines = [f"{name}: {count:,}" for name, count in counts.parts.items()]
    lines += [f"total: {counts.total:,}", f"active per token: {counts.active:,}"]
    if model.vocab_size is None:
        lines.append(
            "(without embedding, output projection and tables of token ids: model.vocab_size is left to the tokenizer)"
        )
    lines.append(f"forward MFLOPs per token: {forward_flops_per_token(model, train.sequence_length) / 1e6:,.2f}")
    if model.memory is not None:
        lines.append(f"bytes of table read per token: {counts.read_values * train.element_bytes:,}")
    return ConfigSection("parameters", tuple(lines))


def _bytes_section(config: RunConfig) -> ConfigSection:
    """Bytes that training takes per parameter, by what updates it, before ranks share the state."""
    weight, optimizer = config.train.element_bytes, config.optimizer
    others = dense_state(config)
    parts = {"other weights": (GRADIENT_BYTES, others)}
    if saved := matrix_saving(config):
        parts = {"hidden matrices": (GRADIENT_BYTES, others - saved), **parts}
    if config.model.memory is not None:
        parts = {"tables": (held_table_gradient_bytes(optimizer), table_state(config)), **parts}
    lines = [
        f"{name}: {weight} + {gradient} + {state:.4g} = {weight + gradient + state:.4g}"
        for name, (gradient, state) in parts.items()
    ]
    return ConfigSection("bytes per parameter, of weight + gradient + optimizer's state", tuple(lines))


def _feed_forward_line(model: ModelConfig) -> str:
    """Standard deviations of a feed-forward's output at initialisation, by the closed formulas."""
    paper, true = math.sqrt(paper_ffn_variance(model)), math.sqrt(swiglu_ffn_variance(model))
    line = f"feed-forward: output std {paper:.4g} by the paper's Eq. 25, {true:.4g} of the SwiGLU as it is initialised"
    return line if model.moe is None else f"{line}, both for a dense one of the width that a token passes"


def _measured_lines(model: ModelConfig, seed: int, most_layers: int) -> Iterator[str]:
    """Standard deviations of memory layers' outputs at initialisation, measured on single layers."""
    # Not at the top of the file: torch and Megatron take seconds to load, and nothing else here needs them.
    from megamem.initialisation.outputs import measure_initial_outputs

    try:
        with warnings.catch_warnings():
            # Megatron warns about optional packages.
            warnings.simplefilter("ignore")
            measured = measure_initial_outputs(model, seed=seed, most_layers=most_layers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for layer in measured:
        figures = [f"sigma_V {layer.table_std:.4g}", f"output std measured {layer.measured_std:.4g}"]
        if layer.calibration is not None:
            figures.insert(0, f"score gain {layer.calibration.gain:.4g}, sigma_s {layer.calibration.sigma_s:.3g}")
        if layer.predicted_std is not None:
            figures.append(f"predicted {layer.predicted_std:.4g}")
        if layer.ffn_std is not None:
            figures.append(f"of its feed-forward measured {layer.ffn_std:.4g}")
        yield f"memory of block {layer.block}: {', '.join(figures)}"
    yield (
        f"measured on {len(measured)} of {model.num_memory_layers} memory layers, each on {measured[0].num_tokens} "
        f"random tokens of mean square 1, with the weights and the table rows that seed {seed} gives it"
    )
