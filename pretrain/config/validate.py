"""Checks that need more than a field's type and limits, and advice. No process group or GPU is touched before them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from operator import attrgetter

from kernels.implementations import unavailable
from megamem.families.registry import FAMILIES
from megamem.placement.block_plan import count_blocks
from parallel.machine.devices import num_visible_gpus
from pretrain.config.apex import apex_problems, missing_extensions
from pretrain.config.fields import PLAIN_NAME
from pretrain.config.graphs import graph_problems
from pretrain.config.layout_rules import column_parts_text, layout_problems
from pretrain.config.loader import join_problems
from pretrain.config.position import steps_before, tokens_of_run
from pretrain.config.schedule import schedule_span, table_decay
from pretrain.config.schema import BatchRampConfig, RunConfig, TrainConfig
from pretrain.config.settled import settled
from pretrain.config.suggest import nearest_multiples
from pretrain.config.table_gradients import gradients_problems
from pretrain.errors import ConfigError

_WIDE_LOAD_BYTES = 16
"""A row that is a multiple of this, from its first byte on, is read in the widest loads that a GPU has."""
_MOST_TOKENS = 2**63 - 1


def validate(config: RunConfig, world_size: int | None, *, on_this_machine: bool = True) -> RunConfig:
    """Refuse a configuration that cannot run; the configuration that ranks run (`settled`).

    Args:
        config: the run.
        world_size: ranks of the run; None leaves out the checks that need it (to look at a configuration for another
            machine).
        on_this_machine: the ranks run here; else nothing is asked about this machine's GPUs and packages.

    Raises:
        ConfigError: the configuration cannot run; the message names every problem found, each with key, value and fix.
    """
    problems = [*layout_problems(config, world_size), *batch_problems(config, world_size), *_schedule(config)]
    problems += [
        *_inserted_blocks(config),
        *_trained_layers(config),
        *_trained_rows(config),
        *_health(config),
        *_names(config),
    ]
    problems += _length(config)
    problems += [*gradients_problems(config), *_table_folder(config), *_tables_every(config), *apex_problems(config)]
    problems += _control(config)
    problems += graph_problems(settled(config))
    if on_this_machine:
        problems += _packages(config)
    if world_size is not None and on_this_machine:
        problems += _kernels(config)
    if problems:
        raise ConfigError(join_problems(problems))
    return settled(config)


def validate_layout(config: RunConfig, world_size: int) -> None:
    """Refuse a trained model that these ranks cannot hold or run; nothing is asked about steps, as none are taken.

    Raises:
        ConfigError: the ranks cannot hold or run the model; the message names every problem found, each with key, value
            and fix.
    """
    if problems := [*layout_problems(config, world_size), *_kernels(config)]:
        raise ConfigError(join_problems(problems))


def batch_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Whole microbatches on every data-parallel rank, and as many of them as the schedule needs."""
    train, parallel = config.train, config.parallel
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    data_size = world_size // model_ranks if world_size is not None and world_size % model_ranks == 0 else None
    unit = train.micro_batch_size * (data_size or 1)
    over = f" x data-parallel size {data_size}" if data_size is not None else ""
    # Interleaved chunks take microbatches in rounds of one per stage.
    interleaved = parallel.virtual_pipeline > 1 and data_size is not None
    rounds = parallel.pipeline if interleaved else 1
    for key, sequences in config.model.balanced_sequences.items():
        if train.micro_batch_size % sequences:
            yield (
                f"train.micro_batch_size is {train.micro_batch_size}, which is not a multiple of {key} {sequences}: the "
                f"balance loss is of so many sequences, and a microbatch cannot split them. Use "
                f"train.micro_batch_size {nearest_multiples(train.micro_batch_size, sequences)}, or another {key} "
                "(1 goes with every microbatch), which is another loss"
            )
    sizes = {"train.global_batch_size": train.global_batch_size}
    if train.batch_ramp is not None:
        yield from _batch_ramp(train.batch_ramp, train.global_batch_size)
        # With both, so are all sizes between them.
        sizes["train.batch_ramp.start_size"] = train.batch_ramp.start_size
        sizes["train.batch_ramp.increment"] = train.batch_ramp.increment
    for key, size in sizes.items():
        if size % unit:
            smaller = _smaller_microbatch(train, size, (data_size or 1) * rounds)
            yield (
                f"{key} is {size}, which is not a multiple of train.micro_batch_size {train.micro_batch_size}{over} = "
                f"{unit}: use {nearest_multiples(size, unit * rounds)}{smaller}"
            )
        elif size % (unit * rounds):
            yield (
                f"{key} is {size}, which gives {size // unit} microbatches per rank: with parallel.virtual_pipeline "
                f"{parallel.virtual_pipeline} their number must be a multiple of parallel.pipeline {parallel.pipeline}: "
                f"use {nearest_multiples(size, unit * rounds)}"
            )


def _smaller_microbatch(train: TrainConfig, size: int, unit: int) -> str:
    """The microbatch that keeps a batch of `size` sequences, of which each rank and round has a `unit`th, in words."""
    if train.batch_ramp is not None or size % unit:
        return ""
    return f", or train.micro_batch_size {math.gcd(train.micro_batch_size, size // unit)}"


def _batch_ramp(ramp: BatchRampConfig, batch_size: int) -> Iterator[str]:
    """Increments that lead from the first size to the last."""
    if ramp.start_size >= batch_size:
        yield (
            f"train.batch_ramp.start_size is {ramp.start_size}, not below train.global_batch_size {batch_size}: lower it, "
            "or leave train.batch_ramp out"
        )
    elif (batch_size - ramp.start_size) % ramp.increment:
        yield (
            f"train.batch_ramp.increment is {ramp.increment}, which does not lead from start_size {ramp.start_size} to "
            f"train.global_batch_size {batch_size}: use a divisor of {batch_size - ramp.start_size}"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    _, num_steps = schedule_span(0, optimizer, config.train, config.stage)
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        yield (
            f"optimizer.min_lr is {optimizer.min_lr}, above optimizer.lr {optimizer.lr}: the schedule ends there, "
            "so lower it"
        )
    if optimizer.schedule == "wsd" and optimizer.decay_steps == 0:
        yield (
            "optimizer.decay_steps is 0, and optimizer.schedule wsd ends with a decay of that many steps: "
            "set it, or use schedule: constant"
        )
    decay_steps = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    length = "train.num_steps is" if config.stage is None else f"the {optimizer.schedule_from} has"
    if optimizer.warmup_steps + decay_steps > num_steps:
        decay = f" and optimizer.decay_steps {decay_steps}" if decay_steps else ""
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps}{decay} need {optimizer.warmup_steps + decay_steps} "
            f"steps, but {length} {num_steps}: shorten them or train longer"
        )


def _inserted_blocks(config: RunConfig) -> Iterator[str]:
    """A block, at least, that the others are inserted beside."""
    model = config.model
    if model.memory is not None and not any(number and plan.adds_attention for number, plan in count_blocks(model)):
        what = f"kind is {model.memory.kind}" if model.memory.slot is not None else "placement.position is inserted"
        some = list(range(1, model.num_layers, 2)) or [0]
        yield (
            f"model.memory.{what}, and its placement makes inserted blocks, which have no feed-forward, of all "
            f"{model.num_layers} blocks of the model (model.num_layers counts them too): there is nothing that they are "
            f"inserted into. Name them, as model.memory.placement.blocks: {some}"
            f"{'' if model.num_layers > 1 else ' with model.num_layers: 2'}, or let `megamem upscale` insert them into a "
            "trained model"
        )


def _trained_layers(config: RunConfig) -> Iterator[str]:
    """Layers that are there, each once."""
    layers, depth = config.optimizer.trained_layers, config.model.num_layers
    if layers is None:
        return
    if not layers:
        yield "optimizer.trained_layers is empty: nothing would be trained. Name layers, or use null for all of the model"
    for number in sorted({number for number in layers if number > depth or layers.count(number) > 1}):
        what = f"past model.num_layers {depth}" if number > depth else "there twice"
        yield f"optimizer.trained_layers has {number}, which is {what}: layers are numbered from 1 to {depth}"


def _trained_rows(config: RunConfig) -> Iterator[str]:
    """Rows that can be told apart, of tables of which nothing else moves."""
    optimizer = config.optimizer
    rows, key = optimizer.trained_rows, "optimizer.trained_rows"
    if rows is None:
        return
    if config.model.memory is None:
        yield f"{key} is set, and model.memory is null: there are no rows. Leave {key} out"
        return
    if optimizer.tables != "row_wise" or optimizer.table_gradients == "dense":
        now = f"tables {optimizer.tables}" if optimizer.tables != "row_wise" else "table_gradients dense"
        yield (
            f"{key} is set, and optimizer.{now} has gradients and updates of whole tables: set optimizer.tables: row_wise and "
            "optimizer.table_gradients: rows"
        )
    if optimizer.row_clock == "updates" and (decay := table_decay(optimizer)):
        yield (
            f"{key} is set, and the tables' weight decay {decay:g} would move all other rows, too: set "
            "optimizer.value_weight_decay: 0"
        )
    layers, read = optimizer.trained_layers, {span.read + 1 for span in config.model.memory_spans}
    if layers and read.isdisjoint(layers):
        yield (
            f"{key} is set, and optimizer.trained_layers {list(layers)} read no table, so that nothing would be trained: name "
            f"some of {sorted(read)}, or leave trained_layers out"
        )
    for name in ("background", "text"):
        if getattr(rows, name) == "":
            yield f"{key}.{name} is empty: name a file that `megamem patch counts` wrote, or leave it out"
    if rows.chooses and rows.score != "reads" and rows.background is None:
        yield (
            f"{key}.score is {rows.score}, and {key}.background is null: name the file of the known text's reads that `megamem "
            f"patch counts` writes, or set {key}.score: reads"
        )


def _health(config: RunConfig) -> Iterator[str]:
    health, timeout = config.health, config.parallel.timeout_minutes
    if health.hang_minutes is not None and health.hang_minutes >= timeout:
        yield (
            f"health.hang_minutes is {health.hang_minutes}, and after parallel.timeout_minutes {timeout:g} a collective "
            "ends the run before the ranks have written their stacks: lower the one or raise the other"
        )
    if health.spikes.action == "rewind" and not config.checkpoint.every_steps:
        yield (
            "health.spikes.action is rewind, and checkpoint.every_steps is 0: there would be no checkpoint to go back to. "
            "Set checkpoint.every_steps, or use skip"
        )
    if health.spikes.action != "none" and health.spikes.loss_deviations is health.spikes.grad_norm_deviations is None:
        yield (
            f"health.spikes.action is {health.spikes.action}, and both loss_deviations and grad_norm_deviations are null: "
            "nothing would be judged. Set one of them"
        )


def _table_folder(config: RunConfig) -> Iterator[str]:
    """Refuse files that no table would lie in, as rows have to be known before a step, and copies of whole tables."""
    folder = config.optimizer.table_folder
    if folder is None or config.model.memory is None:
        return
    key, fix = f"optimizer.table_folder is {folder!r}", "leave optimizer.table_folder out"
    if not folder:
        yield f"optimizer.table_folder is empty: name a folder, or {fix}"
    if not any(memory.rows_are_known for memory in config.model.memories):
        kinds = ", ".join(name for name, family in FAMILIES.items() if family.config.rows_are_known)
        sections = " and ".join(f"{name}.kind is {memory.kind}" for name, memory in config.model.families.items())
        yield f"{key}, and {sections}, whose rows are not known before they are read, as those of {kinds} are: {fix}"
    if config.checkpoint.asynchronous:
        yield (
            f"{key}, and checkpoint.asynchronous is true, which copies whole tables in memory: set "
            f"checkpoint.asynchronous: false, or {fix}"
        )


def _tables_every(config: RunConfig) -> Iterator[str]:
    """Refuse steps at the end, or before a checkpoint, whose rows would wait for an update that never comes."""
    every, optimizer = config.optimizer.tables_every, config.optimizer
    if every == 1 or config.model.memory is None:
        return
    key, fix = f"optimizer.tables_every is {every}", "set optimizer.tables_every: 1"
    before = steps_before(config.stage)
    for name, first, last in (
        ("train.num_steps", before, config.train.num_steps),
        ("checkpoint.every_steps", 0, config.checkpoint.every_steps),
    ):
        if (last - first) % every:
            behind = f", behind the {first} steps of stages before," if first else ""
            yield (
                f"{key}, and {name} is {last}, which{behind} is no multiple of it: add "
                f"{every - (last - first) % every}, or {fix}"
            )
    if optimizer.trained_rows is not None:
        yield f"{key}, and optimizer.trained_rows is set, which chooses rows for every step: leave it out, or {fix}"


def _control(config: RunConfig) -> Iterator[str]:
    """Rows that are read in place of others have to be there, and to belong to another sequence."""
    for section, memory in config.model.families.items():
        if memory.control == "none":
            continue
        key, fix = f"{section}.control is {memory.control}", f"leave {section}.control out"
        if memory.control == "others_rows" and config.train.micro_batch_size == 1:
            yield (
                f"{key}, and train.micro_batch_size is 1, so that no other sequence asks for rows: set "
                f"train.micro_batch_size to 2 or more, or {fix}"
            )
        if config.optimizer.table_folder is not None and memory.rows_are_known:
            yield f"{key}, and optimizer.table_folder has the rows alone that tokens ask for: leave it out, or {fix}"


def _length(config: RunConfig) -> Iterator[str]:
    """Tokens of the run, whose places in the data are counted in 64 bits."""
    num_steps = config.train.num_steps
    num_tokens = tokens_of_run(config.train, config.stage, num_steps)
    if num_tokens > _MOST_TOKENS:
        yield f"train.num_steps is {num_steps}, in which a run reads more than {_MOST_TOKENS:,} tokens: lower it"


def _names(config: RunConfig) -> Iterator[str]:
    """Names of folders: the run's, and those of data sets."""
    if not PLAIN_NAME.fullmatch(config.name):
        yield f"name is {config.name!r}: it names a folder, so use letters, digits and . _ - + ="
    entries = [(f"data.datasets.{index}", entry.path, entry.name) for index, entry in enumerate(config.data.datasets)]
    entries += [
        (f"evaluation.datasets.{index}", entry.path, entry.name)
        for index, entry in enumerate(config.evaluation.datasets)
    ]
    with_epochs = [entry.epochs is not None for entry in config.data.datasets]
    if any(with_epochs) and not all(with_epochs):
        index = with_epochs.index(False)
        yield f"data.datasets.{index}.epochs is null, and other entries have epochs: give them to all entries, or to none"
    for key, path, name in entries:
        if not path:
            yield f"{key}.path is empty: give the folder that `megamem data prepare` wrote"
        if name is not None and not name.strip():
            yield f"{key}.name is empty: give the domain a name, or leave it out"


def _packages(config: RunConfig) -> Iterator[str]:
    """Optional packages that the configuration asks for."""
    wanted = (
        (config.model.implementation == "transformer_engine", "model.implementation", "transformer_engine", "te"),
        (config.logging.tensorboard, "logging.tensorboard", "tensorboard", "tracking"),
        (config.logging.wandb_mode != "disabled", "logging.wandb_mode", "wandb", "tracking"),
    )
    for is_wanted, key, module, extra in wanted:
        if is_wanted and importlib.util.find_spec(module) is None:
            value = str(attrgetter(key)(config)).lower() if key == "logging.tensorboard" else attrgetter(key)(config)
            yield (
                f'{key} is {value}, but {module} is not installed: pip install "megamem[{extra}]", or change the option'
            )
    yield from missing_extensions(config)


def _kernels(config: RunConfig) -> Iterator[str]:
    """Implementations of the kernels that this machine cannot run."""
    device_type = "cuda" if num_visible_gpus() else "cpu"
    implementation = config.train.kernels
    if config.model.memory is None and implementation == "cpu":
        # It has nothing in C++.
        return
    # Where there are GPUs, torch may still be built without them: the ranks will know.
    if implementation == "cpu" and device_type == "cuda":
        return
    if reason := unavailable(implementation, device_type):
        yield f"train.kernels is {implementation}, which {reason}"


def advice(config: RunConfig, *, on_gpu: bool = True) -> Iterator[str]:
    """Sentences on a configuration that runs, and may not be what was meant, or could run faster: key, value,
    consequence and the better value.

    Args:
        on_gpu: include sentences that concern GPUs alone.
    """
    yield from _rate_that_stays(config)
    if on_gpu:
        yield from _narrow_rows(config)


def _rate_that_stays(config: RunConfig) -> Iterator[str]:
    """A warm-up that leaves the cosine no step to fall in."""
    optimizer = config.optimizer
    _, num_steps = schedule_span(0, optimizer, config.train, config.stage)
    warmup = optimizer.warmup_steps
    if optimizer.schedule == "cosine" and warmup > 0 and num_steps - warmup <= 1 and optimizer.min_lr < optimizer.lr:
        yield (
            f"optimizer.warmup_steps {warmup} leave the cosine none of the {num_steps} steps to fall in: the last one is "
            f"taken at optimizer.lr {optimizer.lr:g}, and not at min_lr {optimizer.min_lr:g}. Shorten the warm-up, or set "
            "optimizer.schedule to constant"
        )


def _narrow_rows(config: RunConfig) -> Iterator[str]:
    """Parts of rows that a GPU reads in narrower loads."""
    parts, element_bytes = config.parallel.memory_columns, config.train.element_bytes
    widths = {
        f"{section}.{table.key}": table.width
        for section, memory in config.model.families.items()
        for table in memory.tables
    }
    narrow = {key: width // parts for key, width in widths.items() if width // parts * element_bytes % _WIDE_LOAD_BYTES}
    if not narrow:
        return
    rows = ", ".join(f"{columns} columns of {key} ({columns * element_bytes} bytes)" for key, columns in narrow.items())
    better = [
        size
        for size in range(1, parts)
        if parts % size == 0
        and all(
            width % size == 0 and width // size * element_bytes % _WIDE_LOAD_BYTES == 0 for width in widths.values()
        )
    ]
    multiple = parts * _WIDE_LOAD_BYTES // element_bytes
    fix = f"parallel.memory {better[-1] * config.parallel.memory_rows} or " if better else ""
    yield (
        f"{column_parts_text(config.parallel)} leaves every rank {rows} of a row, which is no multiple of {_WIDE_LOAD_BYTES} bytes: "
        f"a GPU reads such rows in narrower loads. {fix}widths that are multiples of {multiple} keep the wide ones"
    )
