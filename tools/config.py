"""`megamem config`: look at a configuration, and at everything that could stand in one."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megamem.config import ModelConfig
from megamem.config_base import Config, field_specs
from megamem.retrieval.initial import paper_ffn_variance, swiglu_ffn_variance
from parallel.pipeline_layout import ModelChunk, chunks_of_stage, model_chunks
from pretrain.config.context_ways import WAYS, context_way, heads_problem, run_costs
from pretrain.config.describe import FieldDoc, describe_fields
from pretrain.config.keys import ineffective_fields
from pretrain.config.loader import to_dict, to_yaml
from pretrain.config.position import tokens_of_run
from pretrain.config.schema import RunConfig
from pretrain.config.source import dump_scalar, dump_yaml
from pretrain.config.stages import StageEntry, load_config, load_stages, read_run, stage_called, to_entries
from pretrain.config.table_gradients import chosen, settled
from pretrain.config.updates import GRADIENT_BYTES, held_table_gradient_bytes
from pretrain.config.validate import advice, validate
from pretrain.errors import ConfigError
from pretrain.planning.costs.equal_compute import Measure, active_measure, core_measure, flops_measure, solve_ffn_width
from pretrain.planning.costs.formulas import count_parameters, forward_flops_per_token
from pretrain.planning.costs.held import HeldBytes, held_bytes
from pretrain.planning.costs.state import dense_state, matrix_saving, table_state
from pretrain.run.folder import RunFolder
from pretrain.run.preflight import check_gpu_memory, check_start, gigabytes, naming_stage
from tools.parameter_table import parameter_tables
from tools.parsers import add_config, add_stage
from tools.ranks import add_device, ranks_for_stages
from tools.stages import stage_chart, stage_table
from tools.words import plural

_WIDTH = 100
_MEASURES = {
    "flops": "forward FLOPs per token",
    "active": "active parameters",
    "core": "active parameters without embeddings and values read",
}
_OVERRIDES_HELP = (
    "set a key, as in optimizer.lr=3e-4, model.memory=null or data.datasets.0.path=DIR (the value is YAML)"
)


def add_parser(subparsers: Any) -> None:
    """Adds `config` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "config",
        help="show or check a configuration",
        description="Look at a configuration as a run would see it, or at every key that there is.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print a configuration in full",
        description="Print a configuration with its bases, overrides and defaults resolved. The output is YAML that "
        "`megamem train` takes. Options that have no effect are left out.",
    )
    add_config(show, "YAML file (not needed with --keys)", _OVERRIDES_HELP, is_needed=False)
    add_stage(show, "print one stage of a run of stages in full")
    show.add_argument("--explain", action="store_true", help="put the help text of each key above it")
    show.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="also build so many memory layers, spread over the model, and measure their initial outputs: some seconds "
        "each (default: none)",
    )
    show.add_argument("--keys", action="store_true", help="list every key there is with type, default and help instead")
    show.set_defaults(func=run_show)
    check = actions.add_parser(
        "check",
        help="say whether a configuration can run",
        description="Load a configuration and check it as `megamem train` does before it starts: keys, layout and "
        "batch, data, run folder, and whether the model fits into this machine's memory. Exits with 0 if it can run.",
    )
    add_config(check, overrides=_OVERRIDES_HELP)
    check.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of the run (default: what `megamem train` would start here)"
    )
    check.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: as `megamem train`: runs/<name>)"
    )
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="leave out checks of this machine: data, folders, memory, and the number of ranks unless --ranks gives it",
    )
    check.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of a GPU elsewhere: refuse a layout that it cannot hold (needs --elsewhere and --ranks)",
    )
    add_device(check)
    check.set_defaults(func=run_check)
    _add_width_parser(actions)
    table = actions.add_parser(
        "table",
        help="print parameters and costs of configurations as Markdown",
        description="Print Markdown tables of parameters by part, operations and table reads per token, beside the "
        "figures of UltraMemV2's paper for the models that it has. docs/parameters.md holds the output for configs/.",
    )
    table.add_argument("configs", metavar="CONFIG", nargs="+", help="YAML files")
    table.set_defaults(func=run_table)


def _add_width_parser(actions: Any) -> None:
    width = actions.add_parser(
        "ffn-width",
        help="solve for the feed-forward width at equal cost",
        description="Print the model.ffn_hidden_size at which CONFIG costs what another configuration costs, or a "
        "given figure. Keys, top-K and sharing can thus be compared at equal computation: set them, and let the "
        "feed-forward pay.",
    )
    add_config(width, overrides=_OVERRIDES_HELP)
    target = width.add_mutually_exclusive_group(required=True)
    target.add_argument("--like", metavar="OTHER", help="YAML file of the model to equal")
    target.add_argument("--target", type=float, metavar="N", help="the figure to meet instead, as in 2.5e9")
    width.add_argument(
        "--match",
        choices=("flops", "active", "core"),
        default="flops",
        help="what is to be equal: forward FLOPs per token at the sequence length of CONFIG (default), active "
        "parameters, or active parameters without embeddings and values read, as the paper counts its larger models",
    )
    width.add_argument(
        "--multiple", type=int, default=64, metavar="M", help="round to a multiple of M, and of parallel.tensor (64)"
    )
    width.set_defaults(func=run_ffn_width)


def run_show(args: argparse.Namespace) -> int:
    """Prints the resolved configuration, or the list of keys."""
    if args.keys:
        if args.config is not None:
            raise ConfigError(
                f"--keys lists the keys of every configuration: leave {args.config} out, or use --explain"
            )
        print("\n".join(key_lines()))
        return 0
    if args.config is None:
        raise ConfigError("config show needs the path of a configuration, or --keys")
    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers is {args.layers}: it must be at least 1")
    stages = read_run(args.config, args.overrides, args.stage).stages()
    config = stages[0] if args.stage is None else stage_called(stages, args.stage)
    if args.explain and args.stage is None and config.stage is not None:
        raise ConfigError("--explain goes through one configuration, and this run has stages: add --stage NAME")
    if args.layers is not None and config.model.memory is None:
        raise ConfigError(f"--layers has no effect: {args.config} has no memory. Leave it out, or set model.memory")
    # Before anything is printed: they may find that the configuration cannot be initialised.
    sections = extra_sections(config, args.layers or 0)
    if config.stage is not None and args.stage is None:
        sections.insert(0, Section("stages", (*stage_table(stages), "", *stage_chart(stages))))
        print(dump_yaml(to_entries(stages)).rstrip())
    else:
        print("\n".join(explained_lines(config)) if args.explain else to_yaml(config).rstrip())
    for section in sections:
        lines = (f"# {line}".rstrip() for line in (f"{section.title}:", *(f"  {line}" for line in section.lines)))
        print("\n" + "\n".join(lines))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Validates a configuration and says so."""
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks is {args.ranks}: it must be at least 1")
    if args.gpu_memory is not None and not (args.elsewhere and args.ranks and args.gpu_memory > 0):
        raise ConfigError(
            f"--gpu-memory is {args.gpu_memory}: it is the memory of a GPU elsewhere, above 0, and needs --elsewhere and "
            "--ranks; here the GPUs are asked"
        )
    stages = load_stages(args.config, args.overrides)
    num_ranks = args.ranks if args.elsewhere else args.ranks or ranks_for_stages(stages)
    folder = RunFolder(args.run_dir or Path("runs") / stages[0].name)
    checked, choices = [], []
    for config in stages:
        with naming_stage(config):
            if (choice := chosen(config)) is not None:
                choices.append(choice.text)
            config = validate(config, num_ranks)
            if args.gpu_memory is not None:
                check_gpu_memory(config, args.ranks, int(args.gpu_memory * 1e9))
            # Parameters are counted with the data's vocabulary where the data is here.
            checked.append(config if args.elsewhere else check_start(config, num_ranks, folder, local=True))
    if not args.elsewhere:
        folder.check_writable()
    where = "" if num_ranks is None else f" on {plural(num_ranks, 'rank')}"
    for sentence in dict.fromkeys(sentence for config in stages for sentence in advice(config)):
        print(f"note: {sentence}", file=sys.stderr)
    print(f"{args.config} can run{where}{'' if args.elsewhere else ' here'}.")
    for text in dict.fromkeys(choices):
        print(f"{text}.")
    if num_ranks is not None:
        held = max((held_bytes(config, num_ranks) for config in checked), key=lambda held: held.total)
        print(
            f"Each rank holds {gigabytes(held.model)} of weights and gradients and {gigabytes(held.optimizer)} of the "
            f"optimizer's state{_in_files(held)}; activations come on top."
        )
    return 0


def _in_files(held: HeldBytes) -> str:
    return f", and keeps {gigabytes(held.files)} of tables and their state in files" if held.files else ""


def run_ffn_width(args: argparse.Namespace) -> int:
    """Prints the width, and as a YAML comment how well it meets the target."""
    if args.multiple < 1:
        raise ConfigError(f"--multiple is {args.multiple}: it must be at least 1")
    config = load_config(args.config, args.overrides)
    flops = flops_measure(config.train.sequence_length)
    measures: dict[str, Measure] = {"flops": flops, "active": active_measure, "core": core_measure}
    measure = measures[args.match]
    if args.like is not None:
        other = load_config(args.like)
        if (other.model.vocab_size is None) != (config.model.vocab_size is None):
            raise ConfigError(
                f"only one of {args.config} and {args.like} has model.vocab_size, which they need to be compared: give "
                "it in both, or in neither"
            )
        target, source = measure(other.model), args.like
    elif args.target <= 0:
        raise ConfigError(f"--target is {args.target}: it must be above 0")
    else:
        target, source = args.target, "--target"
    multiple = math.lcm(args.multiple, config.parallel.tensor)
    try:
        solved = solve_ffn_width(config.model, measure, target, multiple=multiple)
    except ValueError as error:
        raise ConfigError(f"{args.config}: {error}") from error
    print(f"model.ffn_hidden_size: {solved.width}")
    print(
        f"# {_MEASURES[args.match]}: {solved.value:,.0f}, {100 * solved.residual:+.3f} % of {solved.target:,.0f} "
        f"({source})"
    )
    print(f"# the multiple of {multiple} nearest to {solved.exact:.1f}")
    return 0


def run_table(args: argparse.Namespace) -> int:
    """Prints the tables."""
    print(parameter_tables([load_config(path) for path in args.configs]))
    return 0


@dataclass(frozen=True)
class Section:
    """Facts that follow from a configuration, printed below it as YAML comments."""

    title: str
    lines: tuple[str, ...]


def extra_sections(config: RunConfig, measured_layers: int = 0) -> list[Section]:
    """Figures of a configuration to show besides its keys.

    Args:
        config: of any kind.
        measured_layers: memory layers that are built to measure their initial outputs.
    """
    sections = [_length_section(config), _model_section(config), _bytes_section(settled(config))]
    if (choice := chosen(config)) is not None:
        sections.append(Section("choices", (choice.text,)))
    if config.model.memory is not None:
        lines = [_feed_forward_line(config.model)]
        if measured_layers:
            lines += _measured_lines(config.model, config.seed, measured_layers)
        else:
            lines.append("memory: not measured; --layers 4 builds that many of its layers and measures them")
        sections.append(Section(f"initialisation ({config.model.memory.initialised_by})", tuple(lines)))
    if config.parallel.pipeline_layout is not None:
        sections.append(_pipeline_section(config))
    if config.parallel.context > 1:
        sections.append(_context_section(config))
    return sections


def _context_section(config: RunConfig) -> Section:
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
    return Section("attention across cut sequences (a rank, per layer and microbatch)", tuple(lines))


def _pipeline_section(config: RunConfig) -> Section:
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
    return Section("pipeline (blocks count from 0)", tuple(lines))


def _chunk_text(chunk: ModelChunk) -> str:
    layers = chunk.layers
    blocks = f"block {layers.start}" if len(layers) == 1 else f"blocks {layers.start}..{layers.stop - 1}"
    parts = ["embedding"] * chunk.has_embedding + [blocks] * bool(layers) + ["loss"] * chunk.has_loss
    return ", ".join(parts)


def _length_section(config: RunConfig) -> Section:
    train, stage = config.train, config.stage
    step_tokens = train.tokens_per_step
    in_all = tokens_of_run(train, stage, train.num_steps) - (0 if stage is None else stage.tokens_before)
    return Section("length", (f"tokens per step: {step_tokens:,}", f"tokens in all: {in_all:,}"))


def _model_section(config: RunConfig) -> Section:
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
    return Section("parameters", tuple(lines))


def _bytes_section(config: RunConfig) -> Section:
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
    return Section("bytes per parameter, of weight + gradient + optimizer's state", tuple(lines))


def _feed_forward_line(model: ModelConfig) -> str:
    """Standard deviations of a feed-forward's output at initialisation, by the closed formulas."""
    paper, true = math.sqrt(paper_ffn_variance(model)), math.sqrt(swiglu_ffn_variance(model))
    line = f"feed-forward: output std {paper:.4g} by the paper's Eq. 25, {true:.4g} of the SwiGLU as it is initialised"
    return line if model.moe is None else f"{line}, both for a dense one of the width that a token passes"


def _measured_lines(model: ModelConfig, seed: int, most_layers: int) -> Iterator[str]:
    """Standard deviations of memory layers' outputs at initialisation, measured on single layers."""
    # Not at the top of the file: torch and Megatron take seconds to load, and nothing else here needs them.
    from megamem.initial_outputs import measure_initial_outputs

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


def key_lines() -> Iterator[str]:
    """Every key with type, default and help."""
    entries = [dataclasses.replace(doc, key=f"stages.N.{doc.key}") for doc in describe_fields(StageEntry)]
    for doc in (*describe_fields(RunConfig), *entries):
        if doc.is_section:
            default = {None: ", default null", (): ", default []"}.get(doc.default, "")
            yield f"\n{doc.key}: {doc.type}{default}"
        else:
            default = "required" if doc.default is MISSING else f"default {dump_scalar(doc.default)}"
            yield f"{doc.key}: {doc.type}, {default}"
        condition = f" Only where {doc.effective_when}." if doc.effective_when else ""
        yield from textwrap.wrap(doc.doc + condition, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def explained_lines(config: RunConfig) -> Iterator[str]:
    """The configuration as YAML with the help text above each key; keys without effect appear as comments."""
    docs = {doc.key: doc for doc in describe_fields(RunConfig)}
    silent = {item.key: item.reason for item in ineffective_fields(config) if item.at_default}
    yield from _explained_section(config, "", docs, silent)


def _explained_section(config: Any, prefix: str, docs: dict[str, FieldDoc], silent: dict[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for item in dataclasses.fields(config):
        key, value = f"{prefix}{item.name}", getattr(config, item.name)
        if not prefix and dataclasses.is_dataclass(value):
            yield ""
        comment = f"{indent}# "
        yield from textwrap.wrap(docs[key].doc, _WIDTH, initial_indent=comment, subsequent_indent=comment)
        if key in silent:
            yield f"{comment}{item.name}: without effect unless {silent[key]}"
        elif isinstance(value, Config):
            is_silent = all(f"{key}.{name}" in silent for name in field_specs(type(value)))
            yield f"{indent}{item.name}:{' {}' if is_silent else ''}"
            yield from _explained_section(value, f"{key}.", docs, silent)
        elif isinstance(value, tuple) and value:
            plain = [to_dict(part) if dataclasses.is_dataclass(part) else part for part in value]
            yield f"{indent}{item.name}:"
            yield textwrap.indent(dump_yaml(plain).rstrip(), f"{indent}  ")
        else:
            yield f"{indent}{item.name}: {'[]' if value == () else dump_scalar(value)}"
