"""`megamem compare --grow`: one model is trained, grown in several ways, and what was made of it is trained on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lab.pages import Page
from lab.studies.compare.arguments import command_line, open_page
from lab.studies.compare.growth_report import GrownFigures, plot, report, table
from lab.studies.compare.key_files import read_keys
from lab.studies.compare.rules import load_configs, model_figures, overrides_among, with_seed
from lab.studies.compare.runs import RunResult, RunStopped, Trainer, finished_steps
from pretrain.config.loader import from_dict, to_dict
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.source import dump_inline
from pretrain.config.validate import validate
from pretrain.errors import ConfigError
from pretrain.growth.config import grown_config
from pretrain.growth.placement import PLACEMENTS, Placement
from pretrain.growth.plan import METHODS, GrownBlock, Method, grown_blocks
from pretrain.run.folder import RunFolder
from tools.common.drawing import svg
from tools.common.ranks import default_num_ranks, import_engine
from tools.common.vocabulary import with_vocabulary_of

_MEMORY_KEY = "model.memory."
_WAY = {"insert": METHODS, "blocks": None, "placement": PLACEMENTS, "trained": ("inserted", "all"), "keys": None}
_MAX_FILE_BYTES = 2**32


@dataclass(frozen=True)
class Way:
    """One way of growing a model, and of training what it makes.

    Attributes:
        name: name of the model that it makes.
        insert: method that inserts blocks; None: the model stays as it is.
        num_blocks: number of inserted blocks.
        placement: places of the inserted blocks; None: the method's own.
        freezes: the inserted blocks alone are trained.
        keys: keys of the memory that is inserted, and of the training.
    """

    name: str
    insert: Method | None
    num_blocks: int
    placement: Placement | None
    freezes: bool
    keys: Mapping[str, Any]

    def blocks(self, num_layers: int) -> tuple[GrownBlock, ...]:
        """Blocks of the grown model.

        Raises:
            ConfigError: the model's depth does not allow it.
        """
        if self.insert is None:
            return tuple(GrownBlock((layer,)) for layer in range(num_layers))
        return grown_blocks(self.insert, num_layers=num_layers, num_inserted=self.num_blocks, placement=self.placement)

    @cached_property
    def memory_keys(self) -> list[str]:
        """Overrides that make the grown model."""
        return [f"{key}={dump_inline(value)}" for key, value in self.keys.items() if key.startswith(_MEMORY_KEY)]

    @cached_property
    def training_keys(self) -> list[str]:
        """Overrides of its training."""
        return [f"{key}={dump_inline(value)}" for key, value in self.keys.items() if not key.startswith(_MEMORY_KEY)]


@dataclass(frozen=True)
class Growth:
    """A growth file.

    Attributes:
        continued: keys of the training after growing, whichever the way.
        ways: ways to grow.
    """

    continued: Mapping[str, Any]
    ways: tuple[Way, ...]


def read_growth(path: Path) -> Growth:
    """Read a growth file.

    Raises:
        ConfigError: the file is wrong; the message names it, what is wrong and what is expected.
    """
    content = read_keys(path, "--grow", "growth", ("continued", "ways"))
    continued, ways = content["continued"], content["ways"]
    if not isinstance(continued, dict) or not isinstance(ways, dict) or not ways:
        raise ConfigError(f"{path}: continued is a mapping of keys to values, and ways one of names to what is done")
    if wrong := [key for key in continued if str(key).split(".")[0] in ("model", "seed", "name")]:
        raise ConfigError(f"{path}: continued has {wrong[0]}: the model is as it was grown, so set it under ways")
    return Growth(continued, tuple(_way(path, name, content) for name, content in ways.items()))


def _way(path: Path, name: str, content: Any) -> Way:
    if not isinstance(content, dict) or not set(content) <= set(_WAY) or "trained" not in content:
        raise ConfigError(
            f"{path}: {name} is {content!r}, expected a mapping with trained, and any of {', '.join(_WAY)}"
        )
    for key, values in _WAY.items():
        if values is not None and key in content and content[key] not in values:
            raise ConfigError(f"{path}: {key} of {name} is {content[key]!r}, expected one of {', '.join(values)}")
    insert, blocks = content.get("insert"), content.get("blocks", 0)
    if type(blocks) is not int or (insert is None) != (blocks == 0) or blocks < 0:
        raise ConfigError(f"{path}: blocks of {name} is {blocks!r}, expected how many are inserted, beside insert")
    freezes = content["trained"] == "inserted"
    if insert is None and (freezes or "placement" in content):
        raise ConfigError(f"{path}: {name} inserts nothing, so it has no placement, and all of it is trained")
    keys = content.get("keys", {})
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: keys of {name} is {keys!r}, expected a mapping of keys to values")
    return Way(name, insert, blocks, content.get("placement"), freezes, keys)


def run_growth(args: argparse.Namespace) -> int:
    """Trains and grows what is not there yet, and writes the report."""
    if args.tune is not None:
        raise ConfigError("--tune has no effect on --grow: set learning rates in the growth file")
    growth = read_growth(args.grow)
    configs = load_configs(args.configs, args.overrides)
    if len(configs) > 1:
        raise ConfigError(f"--grow grows one model, and there are {len(configs)}: name one CONFIG")
    page = open_page(args, "growth")
    command = command_line(args, "compare", "--grow", str(args.grow))
    overrides = overrides_among(args.configs, args.overrides)
    (base,) = configs.values()
    comparison = GrowthComparison(base, growth, overrides, args.seeds, args.nproc, args.run_dir, page, command)
    try:
        comparison.train()
    except RunStopped as stopped:
        return stopped.exit_code
    return 0


class GrowthComparison:
    """One model, the ways in which it is grown, and what is known of them so far."""

    def __init__(
        self,
        base: RunConfig,
        growth: Growth,
        overrides: Sequence[str],
        seeds: Sequence[int],
        num_ranks: int | None,
        run_dir: Path,
        page: Page,
        command: str,
    ) -> None:
        """Check that every run can be made.

        Args:
            overrides: overrides of the command line, which hold for both trainings.
            seeds: seeds of the model's weights, and of what is drawn when it is grown.
            num_ranks: None: as many as the layout needs.
            run_dir: folder of the runs.
            page: page for the report.
            command: command that makes the report again.

        Raises:
            ConfigError: a model cannot be grown in one of the ways, or not trained.
            DataError: the data is not there.
        """
        from pretrain.data.blend import check_blend

        self.base = with_vocabulary_of(base, check_blend(base.data.datasets))
        self.growth, self.seeds, self.run_dir, self.page, self.command = growth, seeds, run_dir, page, command
        self.num_ranks = num_ranks or default_num_ranks(base.parallel)
        later = [text for text in overrides if not text.startswith("model.")]
        self.grown = {way.name: planned(self.base, growth, way, later) for way in growth.ways}
        if self.base.name in self.grown:
            raise ConfigError(f"a way and the model are both called {self.base.name}: give each a name of its own")
        for seed in seeds:
            for config in (self.base, *self.grown.values()):
                validate(with_seed(config, seed), self.num_ranks)
        import_engine()
        self.figures = [
            self._figures(self.base, None),
            *(self._figures(self.grown[way.name], way) for way in growth.ways),
        ]
        self.results: dict[str, list[RunResult]] = {}

    def _figures(self, config: RunConfig, way: Way | None) -> GrownFigures:
        costs = model_figures(config)
        added = costs.total - model_figures(self.base).total
        return GrownFigures(costs, added, added if way is not None and way.freezes else costs.total)

    def train(self) -> None:
        """Train the model and what is made of it, with each seed, and report it.

        Raises:
            CheckpointError: a folder holds a run of something else.
            RunStopped: a run did not come to its end.
        """
        models = (self.base, *self.grown.values())
        # Every folder is looked at before the first run starts, so that one of another comparison is found at once.
        for seed in self.seeds:
            for config in models:
                finished_steps(with_seed(config, seed), RunFolder(self._folder(config, seed)))
        trainer = Trainer(
            self.num_ranks,
            num_runs=len(models) * len(self.seeds),
            num_steps=len(self.seeds) * sum(config.train.num_steps for config in models),
        )
        for seed in self.seeds:
            base = self._folder(self.base, seed)
            self._keep(
                self.base.name, trainer.train(with_seed(self.base, seed), base, f"{self.base.name}, seed {seed}")
            )
            for way in self.growth.ways:
                config = with_seed(self.grown[way.name], seed)
                start = base / "grown" / way.name
                if not start.exists():
                    grow(base, way, seed, start)
                folder = self._folder(config, seed)
                self._keep(way.name, trainer.train(config, folder, f"{way.name}, seed {seed}", start=start))
        print(f"\n{table(self.figures, self.results)}\n\nreport: {self.page.path}\nplot: {self.page.plot}", flush=True)

    def _folder(self, config: RunConfig, seed: int) -> Path:
        return self.run_dir / config.name / f"seed_{seed}"

    def _keep(self, name: str, result: RunResult) -> None:
        self.results.setdefault(name, []).append(result)
        text = report(
            self.base,
            list(self.grown.values()),
            self.figures,
            self.results,
            seeds=self.seeds,
            plot_name=self.page.plot.name,
            command=self.command,
        )
        self.page.write(text, svg(plot(self.figures, self.results)))


def planned(base: RunConfig, growth: Growth, way: Way, overrides: Sequence[str]) -> RunConfig:
    """Configuration that trains the grown model of a way.

    Args:
        base: configuration that the model was trained with.
        overrides: overrides of all else, but for what the way trains.

    Raises:
        ConfigError: the model cannot be grown so, or a key is wrong.
    """
    blocks = way.blocks(base.model.num_layers)
    grown = grown_config(base, blocks, way.memory_keys, name=way.name, origin=base.name)
    trained = [number for number, block in enumerate(blocks, start=1) if block.inserted is not None]
    continued = [f"{key}={dump_inline(value)}" for key, value in growth.continued.items()]
    frozen = [f"optimizer.trained_layers={trained}"] if way.freezes else []
    return from_dict(
        to_dict(grown), f"the grown model {way.name}", [*continued, *way.training_keys, *overrides, *frozen]
    )


def grow(base: Path, way: Way, seed: int, output: Path) -> None:
    """Write the folder of a run at step 0 whose model is that of a run, grown."""
    # These import torch.
    from pretrain.convert.convert import convert
    from pretrain.convert.format import ConversionTarget
    from pretrain.convert.names import NATIVE
    from pretrain.convert.registry import FORMATS, open_checkpoint
    from pretrain.convert.resources import Resources
    from pretrain.growth.upscale import upscale
    from tools.checkpoint.phases import Phases

    opened = open_checkpoint(base)
    blocks = way.blocks(opened.config.model.num_layers)
    grown = upscale(opened, blocks, [*way.memory_keys, f"seed={seed}"], name=way.name)
    target = ConversionTarget(ParallelConfig(), with_optimizer=False, dtype=None, max_file_bytes=_MAX_FILE_BYTES)
    output.parent.mkdir(parents=True, exist_ok=True)
    resources = Resources(num_workers=1, max_memory_bytes=_MAX_FILE_BYTES)
    with Phases() as phases:
        convert(grown.checkpoint, FORMATS[NATIVE], output, target, resources, on_start=phases.start)
