"""`megamem study recall`: how many facts do models of equal compute know by heart?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.facts import MAX_FACTS
from lab.studies.compare.arguments import (
    add_at_once,
    add_controls,
    add_folders,
    add_models,
    add_seeds,
    command_line,
    open_page,
    refuse_launcher,
)
from lab.studies.compare.controls import Controlled, controls_of, distinct, notes_of, trained_once, with_memory
from lab.studies.compare.rules import ModelFigures, load_configs, model_figures
from lab.studies.compare.runs import RunStopped, Trainer
from lab.studies.compare.side_by_side import run_side_by_side
from lab.studies.recall.report import plot, report, table
from lab.studies.recall.told import Told
from pretrain.config.schema import RunConfig
from pretrain.config.validate import validate
from tools.common.drawing import svg
from tools.common.ranks import add_nproc, import_engine
from tools.common.vocabulary import with_vocabulary_of

if TYPE_CHECKING:
    from lab.studies.recall.asking import Recall

_EPILOG = """\
examples:
  megamem study recall lab/configs/compare/dense.yaml lab/configs/compare/ultramemv2.yaml --facts 1024,4096,16384 --nproc 2

Every model is trained on documents that state so many facts (names with random values) again and again, for as many
tokens and steps as its configuration says; bytes are its tokens. Then it is asked for the values. A seed is that of
the weights, of the facts and of their order. The run of a model, a number of facts and a seed is in
DIR/NAME/facts_N/seed_S, the documents in DIR/data/facts_N/seed_S. Finished runs are kept and interrupted ones resumed.

With --controls, every model with a memory is also told the facts without what makes it one, as `megamem study compare
--controls` says: it takes seven times as long. With --at-once N, N runs train side by side.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `recall` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "recall",
        help="count the facts that models know by heart, at equal compute",
        description="Train models on rising numbers of random facts, ask them, and write a table and a plot.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser)
    parser.add_argument(
        "--facts",
        type=numbers_of_facts,
        default=(1024, 4096, 16384),
        metavar="N,N",
        help="numbers of facts (default: 1024,4096,16384)",
    )
    add_seeds(parser, (1,), "weights and facts")
    add_controls(parser, "tell every model with a memory again without what makes it one")
    add_at_once(parser)
    add_folders(parser, "recall", "recall")
    add_nproc(parser, "1", default=1)
    parser.set_defaults(func=run_recall)


def numbers_of_facts(text: str) -> tuple[int, ...]:
    """The value of `--facts`."""
    numbers = tuple(sorted({int(part) for part in text.split(",")}))
    if not 1 <= numbers[0] <= numbers[-1] <= MAX_FACTS:
        raise argparse.ArgumentTypeError(f"{text}: give numbers from 1 to {MAX_FACTS}, the names that there are")
    return numbers


def run_recall(args: argparse.Namespace) -> int:
    """Trains and asks what is not there yet, and writes the report."""
    refuse_launcher("recall")
    models = list(load_configs(args.configs, args.overrides).values())
    notes: list[str] = []
    if args.controls:
        controlled = _controlled(models, args.controls)
        models += distinct(controlled)
        notes = notes_of(controlled)
        for note in notes:
            print(f"note: {note}", flush=True)
    for config in models:
        validate(config, args.nproc)
    page = open_page(args, "recall")
    command = command_line(args, "recall", "--facts", ",".join(map(str, args.facts)))
    import_engine()
    figures = _figures(models)
    plan = [
        Told.of(config, number, seed, args.run_dir, args.nproc)
        for seed in args.seeds
        for number in args.facts
        for config in models
    ]
    for run in plan:
        run.write_documents()
    trainer = Trainer(args.nproc, num_runs=len(plan), num_steps=sum(run.config.train.num_steps for run in plan))
    found: dict[str, dict[int, list[Recall]]] = {config.name: {} for config in models}
    try:
        if args.at_once > 1:
            run_side_by_side([run.job() for run in plan if not run.is_asked], args.at_once, args.nproc)
        for run in plan:
            found[run.config.name].setdefault(run.number, []).append(run.recalled(trainer))
            text = report(
                models[0],
                figures,
                found,
                notes=notes,
                seeds=args.seeds,
                plot_name=page.plot.name,
                command=command,
            )
            page.write(text, svg(plot(found)))
    except RunStopped as stopped:
        return stopped.exit_code
    print(f"\n{table(figures, found)}\n\nreport: {page.path}\nplot: {page.plot}", flush=True)
    return 0


def _controlled(models: Sequence[RunConfig], names: Sequence[str]) -> list[Controlled]:
    """The models with a memory, and these controls of them.

    Raises:
        ConfigError: no model has a memory.
    """
    from pretrain.data.tokenizer import ByteTokenizer

    return trained_once([controls_of(config, ByteTokenizer.vocab_size, names) for config in with_memory(models)])


def _figures(models: Sequence[RunConfig]) -> list[ModelFigures]:
    from pretrain.data.tokenizer import ByteTokenizer

    return [model_figures(with_vocabulary_of(config, ByteTokenizer())) for config in models]
