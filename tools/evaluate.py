"""`megamem eval`: loss and bits per byte of a run on its held-out documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parallel.machine.devices import num_visible_gpus
from pretrain.checkpoint.folder import SavedState
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.config.validate import validate_layout
from pretrain.data.blend import check_blend, open_blend
from pretrain.data.manifest import VALIDATION
from pretrain.errors import ConfigError, DataError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, note_edited_config, saved_config
from pretrain.run.trained_data import refuse_other_tokenizer, tokenizer_of
from tools.common.given_text import text_in
from tools.common.ranks import add_nproc, fewest_ranks, run_on_ranks, started_world_size
from tools.scored_text import score_rank
from tools.tables import compare_tables_rank, form_of, token_tables

_EPILOG = """\
examples:
  megamem eval runs/quickstart
  megamem eval runs/quickstart --ablate
  megamem eval runs/quickstart --without-memory
  megamem eval runs/tide --tables full,int8,int4,cut:30,rank:64
  megamem eval runs/quickstart --step 200 --nproc 2 --json
  megamem eval runs/quickstart --text 'def __init__(self):'
  git diff | megamem eval runs/quickstart --text-file - --json
  megamem eval runs/quickstart --data data/other --data data/third train.sequence_length=512
  megamem eval runs/quickstart model.rotary_scaling.kind=ntk model.rotary_scaling.factor=4 train.sequence_length=1024

Every held-out token is predicted once; tokens that end a document count in the loss and have no bytes. gzip and xz
compress the same documents, one after the other. The ranks are data-parallel, whatever layout the model was trained
on; with --own-layout they have that layout (for models that do not fit). Overrides may set the keys under data,
evaluation.datasets, train.sequence_length, train.micro_batch_size, train.kernels, model.rotary_base and
model.rotary_scaling; all other keys are the checkpoint's. With several data sets there is a line for each domain: the
name of its entry, or the end of its path.

--text prints the log-probability, in nats, of every token of a text that begins a document, and of all of it: with --json
a line for each, and one for the text. Windows and ranks are as above, but for one rank where --nproc says no other.

--tables is for memories whose rows the token addresses (docs/token-tables.md). A form is full (as they are), int8, int4
(a scale per row), rank:R (factors of rank R) or cut:P (of the rank that is left when P percent are cut off), or a folder
that `megamem tables` made. The first form is the reference.
"""

_OVERRIDABLE = (
    "data.",
    "evaluation.datasets",
    "train.sequence_length",
    "train.micro_batch_size",
    "train.kernels",
    "model.rotary_",
)


def add_parser(subparsers: Any) -> None:
    """Adds `eval` to the commands of `megamem`."""
    parser = subparsers.add_parser(
        "eval",
        help="loss and bits per byte on held-out documents",
        description="Evaluate a run's newest checkpoint on the held-out documents of its data sets.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="override a key of the run, see below"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest complete one)"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        action="append",
        help="evaluate on the held-out documents of this data set, or on all if it has none, prepared with the run's "
        "tokenizer; may be repeated (default: the run's own)",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="print the log-probability of each token of this text instead")
    text.add_argument(
        "--text-file",
        metavar="FILE",
        help="print the log-probability of each token of this file's text instead; - is standard input",
    )
    add_nproc(parser, "one per GPU, or 2; 1 with --text; or what --own-layout needs")
    parser.add_argument("--own-layout", action="store_true", help="use the layout that the run was trained on")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--without-memory", action="store_true", help="switch the memory's output off in every block")
    memory.add_argument("--ablate", action="store_true", help="evaluate with and without the memory's output")
    memory.add_argument(
        "--tables",
        metavar="FORM,FORM",
        help="evaluate with the memory's tables in each of these forms, one after the other, see below",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --text, one per line")
    parser.set_defaults(func=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluates and prints."""
    overrides = _overrides(args.overrides, args.data)
    folder = RunFolder(args.run)
    saved = find_checkpoint(folder, args.step)
    config = saved_config(saved, None if args.own_layout else ParallelConfig(), overrides)
    note_edited_config(folder, saved)
    if (args.without_memory or args.ablate) and config.model.memory is None:
        option = "--ablate" if args.ablate else "--without-memory"
        raise ConfigError(f"{args.run} is a model without memory: leave {option} out")
    text = text_in(args.text_file, "--text-file") if args.text_file is not None else args.text
    if text is not None:
        return _score(args, text, config, folder, saved)
    with_memory = (True, False) if args.ablate else (not args.without_memory,)
    by_default = fewest_ranks(config.parallel) if args.own_layout else num_visible_gpus() or 2
    num_ranks = started_world_size() or args.nproc or by_default
    validate_layout(config, num_ranks)
    check_data(config, folder, saved, moved=not args.data)
    if args.tables is not None:
        words = args.tables.split(",")
        for word in words:
            form_of(word, token_tables(config, "--tables"))
        return run_on_ranks(lambda: compare_tables_rank(config, saved.path, words, args.json), num_ranks)
    return run_on_ranks(lambda: evaluate_rank(config, saved.path, with_memory, args.json), num_ranks)


def _score(args: argparse.Namespace, text: str, config: RunConfig, folder: RunFolder, saved: SavedState) -> int:
    """Print the log-probabilities of a text.

    Raises:
        ConfigError: the text has no token, or an option says something of held-out documents.
    """
    given = {"--data": args.data, "--ablate": args.ablate, "--tables": args.tables}
    of_data = [word for word in args.overrides if word.startswith(("data.", "evaluation."))]
    if without_effect := [*(option for option, value in given.items() if value), *of_data]:
        raise ConfigError(
            f"{without_effect[0]} is for held-out documents, and --text names a text: leave one of them out"
        )
    tokenizer = tokenizer_of(folder, saved)
    ids = tokenizer.tokenize(text)
    if not ids:
        raise ConfigError("the text has no tokens: give one with --text or --text-file")
    num_ranks = started_world_size() or args.nproc or (fewest_ranks(config.parallel) if args.own_layout else 1)
    validate_layout(config, num_ranks)
    work = partial(score_rank, config, tokenizer, saved.path, ids, not args.without_memory, args.json)
    return run_on_ranks(work, num_ranks)


def _overrides(words: Sequence[str], data: Sequence[str] | None) -> list[str]:
    """The overrides of the command line, those of `--data` among them.

    Raises:
        ConfigError: a key cannot be overridden.
    """
    for word in words:
        if not word.startswith(_OVERRIDABLE):
            raise ConfigError(
                f"{word} cannot be overridden in an evaluation, only keys under {', '.join(_OVERRIDABLE)}: leave it out"
            )
    named = [word for word in words if word.startswith(("data.datasets", "evaluation.datasets"))]
    if data and named:
        raise ConfigError(f"--data and {named[0].partition('=')[0]} say the same: leave one of them out")
    sets = [f"evaluation.datasets={json.dumps([{'path': path} for path in data])}"] if data else []
    return [*sets, *words]


def check_data(config: RunConfig, folder: RunFolder, saved: SavedState, *, moved: bool) -> None:
    """Refuse data to evaluate on that is not there, or of another tokenizer; `moved`: the run's own, which may be elsewhere now."""
    try:
        datasets = open_blend(config.evaluated)
    except DataError as error:
        hint = f" If it is elsewhere now: `megamem eval {folder.path} --data DIR`." if moved else ""
        raise DataError(f"{error}{hint}") from error
    paths = ", ".join(str(dataset.path) for dataset in datasets)
    held_out = (dataset.manifest.splits[VALIDATION].num_documents for dataset in datasets)
    if not config.evaluation.datasets and not any(held_out):
        raise DataError(f"{paths}: prepared without held-out documents. Name a data set that has some with --data DIR.")
    refuse_other_tokenizer(datasets, folder, saved)


def evaluate_rank(config: RunConfig, checkpoint: Path, with_memory: Sequence[bool], as_json: bool) -> None:
    """Evaluate on one rank; `with_memory` are the settings of the memory to evaluate, the one after the other."""
    from pretrain.data.held_out import HeldOutDataset, compression_baselines
    from pretrain.engine.session import session
    from pretrain.evaluation.evaluate import evaluate
    from pretrain.evaluation.restore import restore_model
    from pretrain.train.trackers import evaluation_row

    with session(config) as groups:
        tokenizer = check_blend(config.evaluated)
        chunks = restore_model(config, checkpoint, tokenizer, groups)
        separate = config.data.documents == "separate"
        held_out = HeldOutDataset(config.evaluated, config.train.sequence_length, separate_documents=separate)
        found = {}
        for enabled in with_memory:
            for chunk in chunks:
                chunk.set_memory_enabled(enabled)
            found[enabled] = evaluation_row(
                evaluate(
                    chunks,
                    held_out,
                    groups,
                    micro_batch_size=config.train.micro_batch_size,
                    pipeline=config.parallel.pipeline,
                    progress=not as_json,
                )
            )
        if groups.is_main:
            baselines = compression_baselines(config.evaluated)
            if as_json:
                first, *ablated = found.values()
                without = {"without_memory": ablated[0]} if ablated else {}
                named = {f"{name} bits_per_byte": value for name, value in baselines.items()}
                print(json.dumps({"checkpoint": str(checkpoint), **first, **without, **named}), flush=True)
            else:
                print(_table(checkpoint, found, baselines), flush=True)


def _table(checkpoint: Path, found: Mapping[bool, Mapping[str, Any]], baselines: Mapping[str, float]) -> str:
    first = next(iter(found.values()))
    names = {True: "this model", False: "this model without its memory"}
    bits = {names[enabled]: row["bits_per_byte"] for enabled, row in found.items()} | dict(baselines)
    lines = [
        f"{checkpoint}: {first['validation_loss']:.4f} nats per token over {first['validation_tokens']:,} held-out "
        f"tokens ({first['validation_bytes']:,} bytes)",
        "bits per byte on the held-out documents:",
        *(f"  {name:30} {value:.4f}" for name, value in bits.items()),
        *_domain_lines(found),
    ]
    return "\n".join(lines)


def _domain_lines(found: Mapping[bool, Mapping[str, Any]]) -> Iterator[str]:
    """A line per domain, if there are several: nats per token and bits per byte with each setting of the memory."""
    first = next(iter(found.values())).get("domains", {})
    for name, row in first.items():
        rows = [of_setting["domains"][name] for of_setting in found.values()]
        figures = "; without memory ".join(
            f"{of_domain['validation_loss']:.4f} nats, {of_domain['bits_per_byte']:.4f} bits per byte"
            for of_domain in rows
        )
        yield f"  {name}: {figures} ({row['validation_tokens']:,} tokens)"
