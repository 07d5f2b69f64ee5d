"""The stages of a run as a table, and drawn in text over its tokens. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pretrain.config.position import batch_size_of_run, levels, steps_before, steps_for_tokens, tokens_of_run
from pretrain.config.schedule import group_settings
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.data.blend import domain_names
from tools.common.words import aligned, count_in_millions

_COLUMNS = 72
_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def stage_table(stages: Sequence[RunConfig]) -> Iterator[str]:
    """A line per stage under a head: steps, tokens, context, batch, rates, data, layout."""
    head = ("stage", "steps", "tokens", "sequence", "batch", "lr", "table lr", "data from sample", "layout")
    return aligned([head, *map(_row, stages)])


def _row(config: RunConfig) -> tuple[str, ...]:
    train, stage = config.train, config.stage
    assert stage is not None
    sizes = [level.batch_size for level in levels(train)]
    reset = " (moments reset)" if stage.optimizer_state == "reset" else ""
    return (
        f"{stage.name}{reset}",
        f"{stage.steps_before:,}..{train.num_steps:,}",
        count_in_tokens(tokens_of_run(train, stage, train.num_steps) - stage.tokens_before),
        f"{train.sequence_length:,}",
        " > ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1]))),
        _course_of(lambda step: learning_rate(config, step), config),
        "-" if config.model.memory is None else _course_of(lambda step: table_rate(config, step), config),
        f"{_data(config)} from {stage.first_sample:,}",
        _layout(config.parallel),
    )


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of the backbone at a step of the run."""
    return group_settings(step, config.optimizer, config.train, config.stage)["backbone"][0]


def table_rate(config: RunConfig, step: int) -> float:
    """Learning rate of the values at a step of the run."""
    return group_settings(step, config.optimizer, config.train, config.stage)["values"][0]


def _course_of(rate: Callable[[int], float], config: RunConfig) -> str:
    """A rate at the first step, after warm-up and at the last step, once each where they are the same."""
    first, last = steps_before(config.stage), config.train.num_steps - 1
    warm = min(last, max(first, first + config.optimizer.warmup_steps))
    return " > ".join(dict.fromkeys(f"{rate(step):.3g}" for step in (first, warm, last)))


def _data(config: RunConfig) -> str:
    entries = config.data.datasets
    total = sum(entry.weight for entry in entries)
    return " + ".join(
        name if len(entries) == 1 else f"{100 * entry.weight / total:.3g}% {name}"
        for entry, name in zip(entries, domain_names(entries), strict=True)
    )


def _layout(layout: ParallelConfig) -> str:
    axes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "memory")}
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "data"


def stage_chart(stages: Sequence[RunConfig]) -> Iterator[str]:
    """Rates, batch and context over the tokens of the run: a column for as many tokens each, every line from 0 to its
    own largest value; and where stages begin."""
    courses: dict[str, Callable[[RunConfig, int], float]] = {"lr": learning_rate}
    if stages[0].model.memory is not None:
        courses["table lr"] = table_rate
    courses["batch (tokens)"] = lambda config, step: (
        batch_size_of_run(config.train, config.stage, step) * config.train.sequence_length
    )
    courses["sequence"] = lambda config, step: config.train.sequence_length
    places = list(_places(stages))
    label = max(map(len, courses))
    for name, course in courses.items():
        values = [course(config, step) for config, step in places]
        largest = max(values) or 1.0
        drawn = "".join(_BARS[max(1, round(8 * value / largest)) if value > 0 else 0] for value in values)
        shown = count_in_tokens(round(largest)) if largest >= 1 else f"{largest:.3g}"
        yield f"{name.ljust(label)}  {drawn}  {shown}"
    yield f"{' ' * label}  {_names(stages, places)}".rstrip()


def _places(stages: Sequence[RunConfig]) -> Iterator[tuple[RunConfig, int]]:
    """The stage and the step in the middle of every column."""
    assert stages[0].stage is not None
    first, last = stages[0].stage.tokens_before, stages[0].stage.run_tokens
    for column in range(_COLUMNS):
        tokens = first + round((column + 0.5) / _COLUMNS * (last - first))
        config = next(
            (each for each in stages if tokens < tokens_of_run(each.train, each.stage, each.train.num_steps)),
            stages[-1],
        )
        assert config.stage is not None
        within = max(1, tokens - config.stage.tokens_before)
        yield (
            config,
            min(config.stage.steps_before + steps_for_tokens(config.train, within), config.train.num_steps) - 1,
        )


def _names(stages: Sequence[RunConfig], places: Sequence[tuple[RunConfig, int]]) -> str:
    """Names of stages where they begin, as far as there is room."""
    line = ""
    for config in stages:
        begins = next((column for column, (there, _) in enumerate(places) if there is config), None)
        if begins is not None and config.stage is not None:
            line = f"{line[:begins].ljust(begins)}|{config.stage.name}"
    return line[:_COLUMNS]


def count_in_tokens(number: int) -> str:
    """ "12,345", "5.4M", "1.20B", "1.60T"."""
    return f"{number / 1e12:.2f}T" if number >= 1e12 else count_in_millions(number)
