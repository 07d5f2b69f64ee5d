"""`stages`: a run as a list of stages, each a complete configuration. Nothing here imports torch.

A file with `stages` describes the run in its sections, and in each entry the stage's differences:

    stages:
      - name: pretrain
        num_tokens: 1.6e12
      - name: decay
        num_tokens: 250e9
        optimizer: {schedule: cosine, warmup_steps: 0}

The sections of an entry are laid over those of the run as a file is laid over its base: mappings key by key, lists and
null replaced. A value of the run that has no effect in a stage is dropped for that stage; one that has an effect in no
stage is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PositiveInt

from megamem.config.base import Advice, Config, field_specs
from megamem.config.identity import Role
from pretrain.config.bases import read_with_bases
from pretrain.config.fields import PLAIN_NAME
from pretrain.config.keys import role_of
from pretrain.config.loader import build, config_changes, join_problems, settle, to_dict
from pretrain.config.position import position_in_data, samples_until, steps_for_tokens
from pretrain.config.schema import RunConfig, StageConfig, TrainConfig
from pretrain.config.sized import Filled, fill, override
from pretrain.config.source import (
    SIZE_KEY,
    STAGES_KEY,
    Layer,
    Node,
    find,
    from_plain,
    kind_of,
    merge,
    without,
)
from pretrain.config.suggest import did_you_mean
from pretrain.errors import ConfigError
from pretrain.state import RunState

CONTINUED = "continued"
"""Name of the one stage of a run that goes on from a checkpoint and has no `stages`."""
NUM_STEPS = ["train", "num_steps"]
# Settled once for all stages, before a rank touches its device.
_SAME_IN_ALL = ("train.deterministic",)


@dataclass(frozen=True)
class StageEntry(Config):
    """An entry of `stages`, besides the sections that it changes: `model`, `parallel`, `train`, `optimizer`, `data`,
    `evaluation`, `checkpoint`, `logging` and `health`."""

    name: str
    """Name of the stage in metrics, reports, and in overrides such as stages.NAME.train.sequence_length=4096."""
    num_steps: PositiveInt | None = None
    """Optimizer steps of the stage."""
    num_tokens: Annotated[PositiveInt | None, Advice("or give num_steps")] = None
    """Its tokens instead: it takes the fewest steps that see so many."""
    optimizer_state: Literal["keep", "reset"] = "keep"
    """At its first step: keep AdamW's moments, or start them at zero with their bias correction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_steps is None) == (self.num_tokens is None):
            raise ValueError(f"stage {self.name} needs either num_steps or num_tokens")


_OWN_KEYS = tuple(field_specs(StageEntry))
_SECTIONS = tuple(name for name, spec in field_specs(RunConfig).items() if spec.section is not None and name != "stage")


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint that a run goes on from in a folder of its own.

    Attributes:
        path: path of the checkpoint.
        state: counters of its run.
        config: configuration that it was trained with.
        known_path: the path that a data set has in `config`, given where it is now.
    """

    path: Path
    state: RunState
    config: RunConfig
    known_path: Callable[[str], str] = str


@dataclass(frozen=True)
class RunSource:
    """Text that describes a run.

    Attributes:
        in_file: the tree of its file and bases.
        tree: `in_file` with overrides laid over it.
        filled: keys that followed from the tree's size; None where it has none.
    """

    in_file: Node
    tree: Node
    filled: Filled | None = None

    @property
    def name(self) -> str:
        """Name of the run, whose folder may name the checkpoint that its stages go on from; `stages` checks it."""
        at = find(self.tree, ["name"])
        name: str = field_specs(RunConfig)["name"].default()
        return at.value if at is not None and isinstance(at.value, str) else name

    def stages(self, start: StartingPoint | None = None) -> tuple[RunConfig, ...]:
        """The configurations of a run, one for each of its stages; of a file without `stages` it is one.

        Each is complete, and knows its place (`RunConfig.stage`), which is None for a run without stages that starts
        anew.

        Args:
            start: the checkpoint that the run goes on from, whose counters it carries on.

        Raises:
            ConfigError: a stage has problems; the message names key, value, file and line, and the fix, of every one in
                every stage.
        """
        if find(self.tree, [STAGES_KEY]) is not None:
            return _placed(_staged(self.tree), start)
        if start is not None:
            return _placed(_staged(_as_one_stage(self.tree)), start)
        return (settle(RunConfig, self.tree, self.in_file)[0],)


def read_run(path: str | Path, overrides: Sequence[str] = (), stage: str | None = None) -> RunSource:
    """The file of a run, its bases and overrides.

    Args:
        path: a YAML file.
        overrides: `key=value` texts, the values in YAML; they apply to the run, and with `stages.NAME.` or `stages.N.`
            before them to an entry, which goes before the run.
        stage: name of the stage whose own entry gets those of them that it would override.

    Raises:
        ConfigError: a file, an override or a size cannot be read.
    """
    in_file = read_with_bases(Path(path))
    texts = overrides if stage is None else _set_in_stage(in_file, overrides, stage)
    tree, filled = fill(override(in_file, texts))
    return RunSource(_filled_alone(in_file), tree, filled)


def _filled_alone(in_file: Node) -> Node:
    """A file's tree without overrides; as it is where they alone give its size a meaning."""
    try:
        return fill(in_file)[0]
    except ConfigError:
        return in_file


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, ...]:
    """The configurations of a run that starts anew. For arguments and errors see `read_run` and `RunSource.stages`."""
    return read_run(path, overrides).stages()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run; of a run of stages, that of the first."""
    return load_stages(path, overrides)[0]


def load_stage(path: str | Path, overrides: Sequence[str] = (), name: str | None = None) -> RunConfig:
    """The one configuration of a run without stages, or that of a stage.

    Args:
        path: a YAML file.
        overrides: `key=value` texts, as in `read_run`; of a stage that is named, they also set what its entry says
            itself.
        name: name of the stage; None in a run without.

    Raises:
        ConfigError: a stage has problems, as in `RunSource.stages`; or no such stage exists, or there are several and
            none is named.
    """
    stages = read_run(path, overrides, name).stages()
    names = names_of(stages)
    if name is None and names:
        raise ConfigError(f"{path} has several stages: name one with --stage: {', '.join(names)}")
    return stages[0] if name is None else stage_called(stages, name)


def _set_in_stage(in_file: Node, overrides: Sequence[str], name: str) -> list[str]:
    """Overrides, with those that a stage's own entry would override given to the entry."""
    listed = find(in_file, [STAGES_KEY])
    entries = listed.value if listed is not None and isinstance(listed.value, list) else []
    entry = next((each for each in entries if (said := find(each, ["name"])) is not None and said.value == name), None)

    def is_outdone(key: str) -> bool:
        return entry is not None and key != "name" and find(entry, key.split(".")) is not None

    return [f"{STAGES_KEY}.{name}.{text}" if is_outdone(text.partition("=")[0].strip()) else text for text in overrides]


def names_of(stages: Sequence[RunConfig]) -> list[str]:
    """Names of the stages; empty for a run without."""
    return [config.stage.name for config in stages if config.stage is not None]


def stage_called(stages: Sequence[RunConfig], name: str) -> RunConfig:
    """The stage of a name.

    Raises:
        ConfigError: no stage has the name.
    """
    names = names_of(stages)
    if name not in names:
        there_are = f"name one with --stage: {', '.join(names)}" if names else "it has none"
        raise ConfigError(f"--stage is {name}: {there_are}")
    return stages[names.index(name)]


def _staged(node: Node) -> list[tuple[StageEntry, RunConfig]]:
    """The stages that a tree with `stages` describes, before they have places: `train.num_steps` is a stage's own.

    Raises:
        ConfigError: a stage has problems, as in `RunSource.stages`.
    """
    listed, run = find(node, [STAGES_KEY]), _as_base(without(node, [STAGES_KEY]))
    assert listed is not None
    if not isinstance(listed.value, list) or not listed.value:
        raise ConfigError(f"{listed.origin}: stages is {kind_of(listed)}, expected a list with an entry for each stage")
    _refuse_other_lengths(node)
    entries, configs, dropped, problems = [], [], [], []
    for number, entry in enumerate(listed.value):
        try:
            own, sections = _split(entry, f"{STAGES_KEY}.{number}")
            entries.append(own)
            # It has a place, which `_placed` will tell, and options that have an effect for that.
            place = from_plain({"stage": {"name": own.name}}, entry.origin, Layer.BASE)
            config, without_effect = settle(RunConfig, merge(merge(run, place), sections))
            configs.append(_with_length(own, config))
            dropped.append(without_effect)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(join_problems(list(dict.fromkeys(problems))))
    _refuse_without_effect(node, dropped)
    _refuse_differences(entries, configs, listed.value)
    return list(zip(entries, configs, strict=True))


def _placed(stages: Sequence[tuple[StageEntry, RunConfig]], start: StartingPoint | None) -> tuple[RunConfig, ...]:
    """The stages one behind the other, each with its place.

    A stage goes on in its data where the last stage before it with the same data sets and the same order stopped,
    `start` included; with other data it begins at the first sample.
    """
    steps = samples = tokens = 0
    positions: list[tuple[Any, int]] = []
    if start is not None:
        # Without the sequences passed over, which the state brings along.
        passed_over = start.state.num_passed_over
        steps, tokens = start.state.step, start.state.consumed_tokens
        samples = start.state.consumed_samples - passed_over
        positions.append((data_order(start.config), position_in_data(start.config, start.state) - passed_over))
    found = []
    for entry, config in stages:
        order = data_order(config if start is None else _as_known(config, start))
        first_sample = next((position for known, position in reversed(positions) if known == order), 0)
        stage = StageConfig(entry.name, entry.optimizer_state, steps, samples, tokens, first_sample)
        num_samples = samples_until(config.train, config.train.num_steps)
        positions.append((order, first_sample + num_samples))
        steps += config.train.num_steps
        samples += num_samples
        tokens += num_samples * config.train.sequence_length
        found.append(replace(config, train=replace(config.train, num_steps=steps), stage=stage))
    return tuple(
        replace(config, stage=replace(config.stage, run_steps=steps, run_tokens=tokens))
        for config in found
        if config.stage is not None
    )


def data_order(config: RunConfig) -> tuple[Any, ...]:
    """All that decides which sequence is sample i of the training data."""
    return config.data.datasets, config.data_seed, config.data.shuffle, config.train.sequence_length


def _as_known(config: RunConfig, start: StartingPoint) -> RunConfig:
    """The configuration with data sets where those of the checkpoint were that it goes on from."""
    datasets = tuple(replace(entry, path=start.known_path(entry.path)) for entry in config.data.datasets)
    return replace(config, data=replace(config.data, datasets=datasets))


def stands_at(config: RunConfig, step: int) -> bool:
    """True for the stage (or run without stages) that trains after so many steps, or trained last once all are done."""
    stage = config.stage
    if stage is None:
        return True
    return stage.steps_before <= step and (step < config.train.num_steps or config.train.num_steps == stage.run_steps)


def stage_of_step(stages: Sequence[RunConfig], step: int) -> int:
    """The number of the stage that trains after so many steps of the run; after all of them, the last."""
    return next((number for number, config in enumerate(stages) if step < config.train.num_steps), len(stages) - 1)


def to_entries(stages: Sequence[RunConfig]) -> dict[str, Any]:
    """Plain values that `load_stages` reads the same stages from: the first one as the run, the others by what differs.

    Their lengths are given in steps.
    """
    run = _without_place(stages[0])
    entries = []
    for config in stages:
        assert config.stage is not None
        entry: dict[str, Any] = {
            "name": config.stage.name,
            "num_steps": config.train.num_steps - config.stage.steps_before,
            "optimizer_state": config.stage.optimizer_state,
        }
        entries.append(entry | _difference(run, _without_place(config)))
    return {**run, STAGES_KEY: entries}


def _without_place(config: RunConfig) -> dict[str, Any]:
    """Plain values of a stage, without its length, which its entry has, and its place, which `_placed` sets."""
    plain = to_dict(config)
    del plain["stage"], plain["train"]["num_steps"]
    return plain


def _difference(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mapping to lay over one mapping to get another; keys that the other leaves out have no effect there."""
    found: dict[str, Any] = {}
    for key, value in above.items():
        known = below.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := _difference(known, value):
                found[key] = inner
        elif key not in below or known != value:
            found[key] = value
    return found


def _as_one_stage(node: Node) -> Node:
    """A tree without stages as a run of one stage, to go on from a checkpoint."""
    length = find(node, NUM_STEPS)
    if length is None:
        length = Node(field_specs(TrainConfig)["num_steps"].default(), node.origin, Layer.BASE)
    else:
        node = without(node, NUM_STEPS)
    assert isinstance(node.value, dict)
    alone = Node({"name": Node(CONTINUED, length.origin, Layer.BASE), "num_steps": length}, length.origin, length.layer)
    return replace(node, value={**node.value, STAGES_KEY: Node([alone], length.origin, length.layer)})


def _as_base(node: Node) -> Node:
    """The tree as if a base had set all of it: a stage may leave any of it without effect."""
    if isinstance(node.value, dict):
        return replace(node, layer=Layer.BASE, value={key: _as_base(child) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, layer=Layer.BASE, value=[_as_base(child) for child in node.value])
    return replace(node, layer=Layer.BASE)


def _split(entry: Node, key: str) -> tuple[StageEntry, Node]:
    """An entry's own keys, and the sections that it changes."""
    if not isinstance(entry.value, dict):
        raise ConfigError(f"{entry.origin}: {key} is {kind_of(entry)}, expected a mapping of keys")
    for name in entry.value:
        if name not in _OWN_KEYS + _SECTIONS:
            words = did_you_mean(name, _OWN_KEYS + _SECTIONS)
            raise ConfigError(
                f"{entry.key_origins[name]}: unknown key {key}.{name}"
                + (words or f": a stage has {', '.join(_OWN_KEYS)}, and the sections {', '.join(_SECTIONS)}")
            )
    own = {name: child for name, child in entry.value.items() if name in _OWN_KEYS}
    sections = {name: child for name, child in entry.value.items() if name in _SECTIONS}
    if (at := find(entry, SIZE_KEY.split("."))) is not None:
        raise ConfigError(
            f"{at.origin}: {key}.{SIZE_KEY}: all stages have one model: write its size in the run's own model"
        )
    if (at := find(replace(entry, value=sections), NUM_STEPS)) is not None:
        raise ConfigError(
            f"{at.origin}: {key}.train.num_steps: write the length of a stage as num_steps beside its name"
        )
    return build(StageEntry, replace(entry, value=own)), replace(entry, value=sections)


def _with_length(entry: StageEntry, config: RunConfig) -> RunConfig:
    """The stage's configuration, whose `train.num_steps` is its length."""
    if entry.num_steps is not None:
        num_steps = entry.num_steps
    else:
        assert entry.num_tokens is not None
        num_steps = steps_for_tokens(config.train, entry.num_tokens)
    return replace(config, train=replace(config.train, num_steps=num_steps))


def _refuse_other_lengths(node: Node) -> None:
    """Refuse a length of the run, which its stages have, or a place in a run that has stages of its own."""
    at = find(node, NUM_STEPS)
    if at is not None and at.last_layer >= Layer.FILE:
        raise ConfigError(
            f"{at.origin}: train.num_steps has no effect in a run of stages, each of which has its num_steps or "
            "num_tokens: remove it"
        )
    if (stage := find(node, ["stage"])) is not None and stage.value is not None:
        raise ConfigError(
            f"{stage.origin}: stage says where one stage stands, and stages lists all of them: remove stage"
        )


def _refuse_without_effect(node: Node, dropped: Sequence[dict[str, str]]) -> None:
    """Refuse values that the run's sections ask for and that have an effect in no stage."""
    problems = []
    for key in dropped[0]:
        at = find(node, key.split("."))
        if all(key in of_stage for of_stage in dropped) and at is not None and at.last_layer >= Layer.FILE:
            problems.append(f"{at.origin}: {key} has no effect in any stage unless {dropped[0][key]}: remove it")
    if problems:
        raise ConfigError(join_problems(problems))


def _refuse_differences(entries: Sequence[StageEntry], configs: Sequence[RunConfig], nodes: Sequence[Node]) -> None:
    """Refuse names that are given twice, and stages of other models than the first."""
    names = [entry.name for entry in entries]
    problems = []
    for entry, config, node in zip(entries, configs, nodes, strict=True):
        is_plain = PLAIN_NAME.fullmatch(entry.name) and "." not in entry.name and not entry.name.startswith("-")
        if not is_plain or entry.name.isdecimal() or names.count(entry.name) > 1:
            problems.append(
                f"{node.origin}: a stage is called {entry.name!r}: use a name that no other stage has, of letters, digits "
                "and _ - + = (not first a -), and not a number"
            )
        for key, change in config_changes(configs[0], config).items():
            if Role.IDENTITY in (role_of(key, configs[0]), role_of(key, config)):
                problems.append(
                    f"{_origin(node, key)}: stage {entry.name} has another model than stage {names[0]} ({change}): the "
                    "weights of one do not fit the other. Remove it"
                )
            elif key in _SAME_IN_ALL:
                problems.append(
                    f"{_origin(node, key)}: stage {entry.name} changes {change}, which all stages share: set it for the "
                    "run"
                )
    if problems:
        raise ConfigError(join_problems(list(dict.fromkeys(problems))))


def _origin(node: Node, key: str) -> str:
    """Place at which an entry sets a key, or the nearest section above it."""
    segments = key.split(".")
    for end in range(len(segments), 0, -1):
        if (at := find(node, segments[:end])) is not None:
            return at.origin
    return node.origin
