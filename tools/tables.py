"""`megamem tables`: the token tables of a run in fewer bits, as factors, or as they are, in files that rows come from; and
what each form costs, for `megamem eval --tables`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamem.token_tables.config import TokenTableConfig
from megamem.token_tables.form import TABLES_FILE, TableForm, parse_form
from parallel.machine.refusals import check_can_write, describe_error
from pretrain.config.schema import ParallelConfig, RunConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.run.folder import RunFolder
from pretrain.run.saved_run import find_checkpoint, saved_config
from tools.common.parsers import add_command
from tools.common.vocabulary import with_vocabulary_of
from tools.common.words import describe_size

_EPILOG = """\
examples:
  megamem tables runs/tide --form int4 --output runs/tide-int4
  megamem generate runs/tide --tables runs/tide-int4 --prompt 'import os'
  megamem eval runs/tide --tables full,runs/tide-int4

Forms: full (as they are), int8, int4 (a scale per row), rank:R (factors of rank R), cut:P (of the rank that is left when P
percent of the columns are cut off). One process, which holds one block of rows at a time, and for factors a square matrix
of the columns. Files are mapped where they are used: rows come from disk, or from the system's cache of it.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `tables` to the commands of `megamem`."""
    parser = add_command(
        subparsers,
        "tables",
        "write token tables for inference: in fewer bits, as factors, in files",
        _EPILOG,
        "Write the token tables of a run's newest checkpoint in another form.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("--form", required=True, metavar="FORM", help="full, int8, int4, rank:R or cut:P")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest one)")
    parser.set_defaults(func=run_tables)


def run_tables(args: argparse.Namespace) -> int:
    """Writes, and says how many bytes."""
    if args.output.exists():
        raise ConfigError(f"--output is {args.output}, which is there: name a folder that is not")
    check_can_write(args.output)
    saved = find_checkpoint(RunFolder(args.run), args.step, pass_over=False)
    config = saved_config(saved, ParallelConfig())
    memory = token_tables(config, "megamem tables")
    form = form_of(args.form, memory)
    from pretrain.data.manifest import open_saved_tokenizer
    from pretrain.evaluation.stored_tables import write_tables

    if config.model.vocab_size is None:
        config = with_vocabulary_of(config, open_saved_tokenizer(RunFolder(args.run).tokenizer))
    try:
        num_bytes = write_tables(saved.path, config, memory, form, args.output)
    except OSError as error:
        raise CheckpointError(f"{args.output} was not made: {describe_error(error)}") from error
    full = bytes_of(parse_form("full"), config, memory)
    print(f"{args.output}: {describe_size(num_bytes)}, {num_bytes / full:.3f} of the {describe_size(full)} as they are")
    return 0


def token_tables(config: RunConfig, option: str) -> TokenTableConfig:
    """The memory of a run, whose rows the token addresses.

    Raises:
        ConfigError: the memory is another one; `option` was asked for.
    """
    if isinstance(config.model.memory, TokenTableConfig):
        if config.model.memory.address is not None:
            raise ConfigError(
                f"{option} is for rows of token ids, which are known as soon as a text is, and model.memory.address is set: "
                "leave the option out, and tables stay on the devices"
            )
        return config.model.memory
    kind = "has no memory" if config.model.memory is None else f"has one of kind {config.model.memory.kind}"
    raise ConfigError(
        f"{option} is for memories whose rows the token addresses, and this model {kind}: docs/token-tables.md lists them"
    )


def form_of(word: str, memory: TokenTableConfig) -> TableForm:
    """The form that a word names, or that the tables of a folder have.

    Raises:
        ConfigError: no such form exists, or rows cannot have it.
    """
    manifest = Path(word) / TABLES_FILE
    try:
        form = parse_form(json.loads(manifest.read_text(encoding="utf-8"))["form"] if manifest.is_file() else word)
        if form.is_factored:
            form.rank_of(memory.value_dim)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"--tables or --form is {word}: {error}") from error
    return form


def bytes_of(form: TableForm, config: RunConfig, memory: TokenTableConfig) -> int:
    """Bytes of all tables of a model in a form."""
    return sum(
        form.num_bytes(
            num_rows=bank.num_rows,
            num_slots=memory.slots_per_address,
            width=memory.value_dim,
            element_bytes=config.train.element_bytes,
        )
        for bank in config.model.memory_plan.banks
    )


def compare_tables_rank(config: RunConfig, checkpoint: Path, words: Sequence[str], as_json: bool) -> None:
    """Run `megamem eval --tables` on one rank: the model with its tables in one form after the other."""
    from pretrain.data.blend import check_blend
    from pretrain.data.held_out import HeldOutDataset
    from pretrain.engine.session import session
    from pretrain.evaluation.evaluate import evaluate
    from pretrain.evaluation.restore import restore_model
    from pretrain.evaluation.stored_tables import open_tables
    from pretrain.train.trackers import evaluation_row

    memory = token_tables(config, "--tables")
    with session(config) as groups:
        tokenizer = check_blend(config.evaluated)
        sized = with_vocabulary_of(config, tokenizer)
        separate = config.data.documents == "separate"
        held_out = HeldOutDataset(config.evaluated, config.train.sequence_length, separate_documents=separate)
        found: dict[str, dict[str, Any]] = {}
        for word in words:
            tables = open_tables(word, checkpoint, memory)
            chunks = restore_model(config, checkpoint, tokenizer, groups, fetch_rows=tables)
            evaluation = evaluate(
                chunks,
                held_out,
                groups,
                micro_batch_size=config.train.micro_batch_size,
                pipeline=config.parallel.pipeline,
                progress=not as_json,
            )
            found[word] = {"table_bytes": bytes_of(tables.form, sized, memory), **evaluation_row(evaluation)}
        if groups.is_main:
            content = {"checkpoint": str(checkpoint), "tables": found}
            print(json.dumps(content) if as_json else _comparison(checkpoint, found), flush=True)


def _comparison(checkpoint: Path, found: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(found.values()))
    lines = [
        f"{checkpoint}: nats per token over {first['validation_tokens']:,} held-out tokens, with the tables as",
        f"  {'form':<24}{'bytes':>12}{'nats':>10}{'more nats':>12}{'perplexity':>12}{'bits per byte':>15}",
    ]
    for word, row in found.items():
        more = row["validation_loss"] - first["validation_loss"]
        change = f"{math.expm1(more):+.2%}" if abs(more) < 700 else "inf"
        lines.append(
            f"  {word:<24}{describe_size(row['table_bytes']):>12}{row['validation_loss']:>10.4f}{more:>+12.4f}"
            f"{change:>12}{row['bits_per_byte']:>15.4f}"
        )
    return "\n".join(lines)
