"""`megamem data`: prepare corpora, train tokenizers, look into prepared data sets."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.suite.tasks import TASKS
from tools.parsers import add_command
from tools.words import plural

if TYPE_CHECKING:
    from pretrain.data.manifest import PreparedDataset
    from pretrain.data.sources import PairFields

_INPUTS_HELP = (
    "files or directories, or the name python-stdlib (the sources of this Python's standard library) or python-packages "
    "(those of the packages that megamem needs, about 100 MB). Directories are read in full, sorted by path; names that "
    "start with a dot are left out. *.jsonl, *.ndjson and *.json are JSON lines, *.csv and *.tsv tables with a header, "
    "*.parquet and *.arrow tables (and so are folders that `datasets` has saved), *.npz arrays 'codes' [N, L] and "
    "'classes' [N], a document each row; every other file is one document of UTF-8 text. Text, lines and CSV are also read "
    "from .gz, .xz, .bz2 and .zst. HTML, PDF, archives and other files that hold no plain text are refused by name"
)

_VALIDATION_FRACTION = 0.01
_FIELD = "text"
_FEW_DOCUMENTS = 10
_PREPARE_EPILOG = """\
examples:
  megamem data prepare python-stdlib --output data/stdlib --validation-fraction 0.05
  megamem data prepare python-packages --tokenizer data/stdlib-4096.json --output data/packages
  megamem data prepare corpus/*.jsonl.zst --field content --tokenizer llama/tokenizer.json --output data/web
  megamem data prepare dump.parquet --output data/dump --max-bad 100
  megamem data prepare reviews.csv.xz --field review --output data/reviews
  megamem data prepare saved/train --validation saved/test --output data/saved
  megamem data prepare site/ --text --output data/html
  megamem data prepare digits-codes.npz --tokenizer codes:64,10 --output data/digits
  megamem data prepare book.txt --output data/book --cut-documents 20000
  megamem data prepare questions.jsonl --prompt-field question --answer-field answer --output data/questions
  megamem data prepare corpus/train --validation corpus/held-out --output data/mine

The output is a folder that `data.datasets` of a run configuration names by its path. It appears when it is complete: a
preparation that is killed leaves nothing that opens. The same command then continues, and repeats at most half a
minute of work. Asking for the same data set again does nothing.
"""

_TOKENIZER_EPILOG = """\
examples:
  megamem data tokenizer python-stdlib --vocab-size 4096 --output data/stdlib-4096.json
  megamem data prepare python-stdlib --tokenizer data/stdlib-4096.json --output data/stdlib-4096
"""

_CODES_EPILOG = """\
examples:
  megamem data codes digits.npz --patch 2 --codes 64 --output digits-codes.npz
  megamem data prepare digits-codes.npz --tokenizer codes:64,10 --output data/digits

Patches are clustered by k-means, the same way every time, and a patch's code is its nearest mean. For images of more than
a few colours use the codes of a trained quantiser, in the same arrays.
"""

_COMPRESS_EPILOG = """\
examples:
  megamem data compress data/stdlib-4096.json --output data/stdlib-4096-map.npy

Ids whose texts differ in case, accents, compatibility forms of Unicode or spaces alone become one. The map is for
`model.memory.token_map` of memories of kind engram; a run keeps it in its checkpoints.
"""

_PACKAGE_EPILOG = """\
examples:
  megamem data package Django==5.2.8 --files 'docs/*.txt' --output data/django.jsonl
  megamem data prepare data/django.jsonl --output data/django --validation-fraction 0.05

Manuals in source archives are prose that every mirror of PyPI has. pip fetches the archive, with its own settings of
mirrors and proxies, and runs the package's build as at an installation.
"""

_VERIFY_EPILOG = """\
examples:
  megamem data verify data/stdlib data/web

Training looks at the sizes and headers of its data sets' files when it starts. This reads all of them.
"""

_SYNTHETIC_EPILOG = """\
examples:
  megamem data synthetic data/stdlib --output data/stdlib-synthetic
  megamem data synthetic data/stdlib --output data/retrieval --tasks needle,kv --lengths 256,1024 --documents 8000

Documents of the tasks that `megamem study probe` asks, in the text and with the tokenizer of a prepared data set, to
be blended with it. None of them holds a name that `megamem study probe` asks for.
"""

_INSPECT_EPILOG = """\
examples:
  megamem data inspect data/stdlib
  megamem data inspect data/stdlib --verify
  megamem data inspect data/stdlib --documents 2 --split validation
"""


def add_parser(subparsers: Any) -> None:
    """Adds `data` to the commands of `megamem`."""
    parser = subparsers.add_parser("data", help="prepare corpora, train tokenizers, inspect data sets")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_prepare(commands)
    _add_tokenizer(commands)
    _add_codes(commands)
    _add_compress(commands)
    _add_package(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_synthetic(commands)


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=_INPUTS_HELP)
    parser.add_argument(
        "--field", default=_FIELD, help="JSON field, or column of a table, with the text (default: text)"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="read every file as one document of UTF-8 text as it is, HTML, JSON and CSV too",
    )
    parser.add_argument(
        "--max-bad",
        type=int,
        default=0,
        metavar="N",
        help="skip and count up to N bad documents (broken JSON, not UTF-8, a truncated archive counts once) before "
        "giving up (default: 0)",
    )


def _add_prepare(commands: Any) -> None:
    parser = add_command(commands, "prepare", "tokenise documents into a data set to train on", _PREPARE_EPILOG)
    _add_input_arguments(parser)
    parser.add_argument(
        "--prompt-field",
        metavar="KEY",
        help="JSON lines are pairs: this field is the prompt, whose tokens are read and not scored",
    )
    parser.add_argument("--answer-field", metavar="KEY", help="this field is the answer, which is scored")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="SPEC",
        help="bytes (256 byte values and an end-of-document token; the default), codes:NUM_CODES,NUM_CLASSES (of *.npz), a "
        "Hugging Face tokenizer.json, or a folder with one",
    )
    parser.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="token that ends a document (default: <|endoftext|>, </s>, <eos> or the like, if there is one)",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=_VALIDATION_FRACTION,
        metavar="F",
        help="share of the text to hold out, in whole documents where they are not too long; 0 holds out nothing "
        "(default: 0.01)",
    )
    parser.add_argument(
        "--validation",
        metavar="INPUT",
        action="append",
        default=[],
        help="hold out the documents of this file or directory, and none of the others; may be repeated",
    )
    parser.add_argument(
        "--cut-documents",
        type=int,
        metavar="N",
        help="cut documents of more than N characters into documents of at most so many, at the ends of paragraphs, "
        "lines, sentences or words (default: leave them whole)",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides which documents are held out (default: 1)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenise (default: one per core)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set that is in the output folder")
    parser.set_defaults(func=run_prepare)


def _add_tokenizer(commands: Any) -> None:
    parser = add_command(commands, "tokenizer", "train a byte-level BPE tokenizer on documents", _TOKENIZER_EPILOG)
    _add_input_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="tokenizer.json to write")
    parser.add_argument(
        "--vocab-size",
        required=True,
        type=int,
        metavar="N",
        help="ids, with the 256 bytes and <|endoftext|> among them (257 or more)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    parser.set_defaults(func=run_tokenizer)


def _add_codes(commands: Any) -> None:
    parser = add_command(commands, "codes", "cut images into patches and quantise them", _CODES_EPILOG)
    parser.add_argument(
        "images",
        type=Path,
        metavar="FILE",
        help=".npz with arrays 'images' [N, H, W] or [N, H, W, C], and 'classes' [N]",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help=".npz to write: 'codes', 'classes' and 'means'"
    )
    parser.add_argument("--patch", type=int, default=2, metavar="N", help="side of a patch, in pixels (default: 2)")
    parser.add_argument("--codes", type=int, default=64, metavar="N", help="codes of the quantiser (default: 64)")
    parser.set_defaults(func=run_codes)


def _add_compress(commands: Any) -> None:
    parser = add_command(
        commands, "compress", "map a tokenizer's ids to fewer, for hashes of n-grams", _COMPRESS_EPILOG
    )
    parser.add_argument(
        "tokenizer", metavar="SPEC", help="a tokenizer.json, a folder that holds one (a prepared data set), or bytes"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".npy to write: an id per token id")
    parser.set_defaults(func=run_compress)


def _add_package(commands: Any) -> None:
    parser = add_command(commands, "package", "texts of a package's source archive, from PyPI", _PACKAGE_EPILOG)
    parser.add_argument("package", metavar="NAME==VERSION", help="package, with an exact version")
    parser.add_argument(
        "--files",
        required=True,
        action="append",
        metavar="PATTERN",
        help="files to take, by their paths in the archive; * matches / too; may be repeated",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".jsonl to write: a line per file")
    parser.set_defaults(func=run_package)


def _add_inspect(commands: Any) -> None:
    parser = add_command(commands, "inspect", "show what a prepared data set holds, and check it", _INSPECT_EPILOG)
    parser.add_argument("path", type=Path, metavar="DIR", help="prepared data set")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare with the hashes of the manifest"
    )
    parser.add_argument(
        "--documents", type=int, default=0, metavar="N", help="print the beginning of the first N documents"
    )
    parser.add_argument(
        "--split", choices=("train", "validation"), default="train", help="split for --documents (default: train)"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON instead of the summary")
    parser.set_defaults(func=run_inspect)


def _add_verify(commands: Any) -> None:
    parser = add_command(commands, "verify", "read every byte of data sets against its hash", _VERIFY_EPILOG)
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR", help="prepared data sets")
    parser.set_defaults(func=run_verify)


def _add_synthetic(commands: Any) -> None:
    parser = add_command(commands, "synthetic", "documents that reward looking back, to train on", _SYNTHETIC_EPILOG)
    parser.add_argument(
        "source", type=Path, metavar="DIR", help="prepared data set, whose training documents fill the text"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--tasks", default=",".join(TASKS), metavar="T,T", help="tasks of `megamem study probe` (default: all)"
    )
    parser.add_argument(
        "--lengths", default="256,512,1024", metavar="N,N", help="tokens of a document, about (default: 256,512,1024)"
    )
    parser.add_argument("--documents", type=int, default=3000, metavar="N", help="documents in all (default: 3000)")
    parser.add_argument("--seed", type=int, default=1, help="of the documents (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set that is in the output folder")
    parser.set_defaults(func=run_synthetic)


def run_prepare(args: argparse.Namespace) -> int:
    """`megamem data prepare`. Raises DataError."""
    from pretrain.data.prepare import prepare
    from pretrain.data.tokenizer import load_tokenizer

    if args.validation and args.validation_fraction != _VALIDATION_FRACTION:
        raise DataError("--validation names what is held out, so --validation-fraction has no effect: leave one out.")
    started = time.monotonic()
    result = prepare(
        args.inputs,
        args.output,
        load_tokenizer(args.tokenizer, args.eod_token),
        field_name=args.field,
        as_text=_as_text(args),
        pair=_pair(args),
        validation_fraction=args.validation_fraction,
        validation_inputs=args.validation,
        cut_documents=args.cut_documents,
        seed=args.seed,
        max_bad=args.max_bad,
        num_workers=args.workers,
        overwrite=args.overwrite,
    )
    if result.was_already_there:
        print(f"{args.output} is already complete: nothing to do.")
    else:
        seconds = time.monotonic() - started
        num_bytes = sum(split.num_bytes for split in result.dataset.manifest.splits.values())
        print(f"Prepared {args.output} in {seconds:.1f} s: {num_bytes / 1e6 / seconds:.2f} MB of text per second.")
    print(_summary(result.dataset))
    if (warning := _held_out_warning(result.dataset)) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _held_out_warning(dataset: PreparedDataset) -> str | None:
    """Warning if few of the documents drawn to be held out decide, or if their share is not that asked for."""
    from pretrain.data.hold_out import HoldOut
    from pretrain.data.indexed_files import longest_document

    manifest, drawn = dataset.manifest, HoldOut(fraction=dataset.manifest.sources["validation_fraction"])
    held_out = manifest.splits["validation"]
    if manifest.sources.get("validation_inputs") or not held_out.num_documents:
        return None
    share = held_out.num_bytes / sum(split.num_bytes for split in manifest.splits.values())
    longest = longest_document(Path(f"{dataset.prefix('validation')}.idx"))
    is_of_few = held_out.num_documents < _FEW_DOCUMENTS or longest > held_out.num_tokens / 2
    if drawn.is_about(share) and not is_of_few:
        return None
    asked = "" if drawn.is_about(share) else f", where {drawn.fraction:.3g} was asked for"
    one = " (one is more than half of it)" if held_out.num_documents > 1 and longest > held_out.num_tokens / 2 else ""
    return (
        f"{plural(held_out.num_documents, 'document')} of {held_out.num_bytes:,} bytes{one}, {share:.3g} of the text{asked}, "
        f"{'decides' if held_out.num_documents == 1 else 'decide'} every validation loss. --cut-documents N makes documents of long texts, and --validation INPUT names what "
        "is held out."
    )


def _as_text(args: argparse.Namespace) -> bool:
    if args.text and args.field != _FIELD:
        raise DataError("--text takes files as they are, so --field has no effect: leave one out.")
    return bool(args.text)


def _pair(args: argparse.Namespace) -> PairFields | None:
    """The fields of prompts and answers, if they are asked for."""
    from pretrain.data.sources import PairFields

    if args.prompt_field is None and args.answer_field is None:
        return None
    if args.prompt_field is None or args.answer_field is None:
        raise DataError("--prompt-field and --answer-field name the two fields of one line: give both.")
    if args.field != _FIELD:
        raise DataError("--field has no effect beside --prompt-field and --answer-field: leave it out.")
    return PairFields(args.prompt_field, args.answer_field)


def run_verify(args: argparse.Namespace) -> int:
    """`megamem data verify`: every data set, and then the first error. Raises DataError."""
    from pretrain.data.manifest import open_dataset

    errors = []
    for path in args.paths:
        try:
            dataset = open_dataset(path)
            dataset.verify()
            print(f"{path}: {_verified(dataset)}")
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("\n".join(errors))
    return 0


def _verified(dataset: PreparedDataset) -> str:
    """Message about a data set in which nothing has changed."""
    from pretrain.data.manifest import MANIFEST_FILE

    said = "every byte is as it was written."
    if dataset.manifest.has_digest:
        return said
    return (
        f"{said[:-1]}, but for {MANIFEST_FILE}, which is from a version that wrote no digest: what it says of inputs, "
        "bytes of text and versions cannot be checked."
    )


def run_synthetic(args: argparse.Namespace) -> int:
    """`megamem data synthetic`. Raises DataError, or ConfigError for a length that is too short."""
    from pretrain.evaluation.suite.documents import prepare_documents

    tasks = tuple(dict.fromkeys(args.tasks.split(",")))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(f"there is no task {unknown[0]!r}: name some of {', '.join(TASKS)}")
    try:
        lengths = sorted({int(part) for part in args.lengths.split(",")})
    except ValueError as error:
        raise ConfigError(f"--lengths is {args.lengths}: give numbers with commas between them") from error
    if min(lengths) < 1 or args.documents < 2:
        raise ConfigError("--lengths must be at least 1, and --documents at least 2, of which one is held out")
    dataset = prepare_documents(
        args.source, args.output, tasks, lengths, args.documents, seed=args.seed, overwrite=args.overwrite
    )
    print(f"Prepared {args.output}: {plural(args.documents, 'document')} of {', '.join(tasks)}.")
    print(_summary(dataset))
    return 0


def run_tokenizer(args: argparse.Namespace) -> int:
    """`megamem data tokenizer`. Raises DataError."""
    from pretrain.data.files import list_files
    from pretrain.data.sources import BadDocumentLog, read_documents
    from pretrain.data.tokenizer import train_bpe

    if args.output.exists() and not args.overwrite:
        raise DataError(f"{args.output} exists. Choose another --output, or pass --overwrite to replace it.")
    bad_documents = BadDocumentLog(args.max_bad)
    as_text = _as_text(args)
    total_bytes = sum(file.size_bytes for file in list_files(args.inputs, as_text=as_text))
    documents = read_documents(args.inputs, field_name=args.field, as_text=as_text, bad_documents=bad_documents)
    tokenizer = train_bpe(documents, args.vocab_size, args.output, total_bytes=total_bytes)
    print(
        f"Wrote {args.output}: {tokenizer.vocab_size} ids, documents end with {tokenizer.eod_token} (id "
        f"{tokenizer.eod})."
    )
    if tokenizer.vocab_size < args.vocab_size:
        print(f"The documents have no more pairs to merge: {args.vocab_size} ids were asked for.")
    if bad_documents.num_bad:
        print(f"Skipped {plural(bad_documents.num_bad, 'bad document')}:")
        print("\n".join(f"  {example}" for example in bad_documents.examples))
    return 0


def run_compress(args: argparse.Namespace) -> int:
    """`megamem data compress`. Raises DataError."""
    from pretrain.data.compression import write_token_map
    from pretrain.data.tokenizer import load_tokenizer

    mapped = write_token_map(load_tokenizer(args.tokenizer), args.output)
    fewer = int(mapped.max()) + 1
    print(
        f"Wrote {args.output}: {len(mapped)} ids become {fewer}, {1 - fewer / len(mapped):.2%} fewer. Train with "
        f"model.memory.token_map={args.output} model.memory.compressed_vocab_size={fewer}"
    )
    return 0


def run_package(args: argparse.Namespace) -> int:
    """`megamem data package`. Raises DataError."""
    from pretrain.data.archives import write_package_texts

    if args.output.exists():
        raise DataError(f"{args.output} exists. Choose another --output, or remove it.")
    print(f"pip fetches the source archive of {args.package} ...", flush=True)
    fetched = write_package_texts(args.package, args.files, args.output)
    print(f"Wrote {args.output}: {plural(fetched.num_documents, 'document')}, {fetched.num_bytes:,} bytes of text.")
    return 0


def run_codes(args: argparse.Namespace) -> int:
    """`megamem data codes`. Raises DataError."""
    from pretrain.data.quantise import quantise_file

    codes = quantise_file(args.images, args.output, patch=args.patch, num_codes=args.codes)
    print(f"Wrote {args.output}: {plural(codes.shape[0], 'image')} of {codes.shape[1]} codes, below {codes.max() + 1}.")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """`megamem data inspect`. Raises DataError."""
    from pretrain.data.manifest import open_dataset

    dataset = open_dataset(args.path)
    print(dataset.manifest.to_json().rstrip() if args.json else _summary(dataset))
    if args.verify:
        dataset.verify()
        said = _verified(dataset)
        print(f"{said[0].upper()}{said[1:]}")
    if args.documents > 0:
        _print_documents(dataset, args.split, args.documents)
    return 0


def _print_documents(dataset: PreparedDataset, split: str, num_documents: int, num_tokens: int = 256) -> None:
    documents = dataset.open_split(split)
    for index in range(min(num_documents, len(documents))):
        ids = documents[index]
        print(f"\n--- {split} document {index}: {len(ids)} tokens ---")
        print(dataset.tokenizer.detokenize(ids[:num_tokens]), end=" [...]\n" if len(ids) > num_tokens else "\n")


def _summary(dataset: PreparedDataset) -> str:
    manifest = dataset.manifest
    tokenizer = manifest.tokenizer
    lines = [
        f"  inputs      {', '.join(manifest.sources['inputs'])} ({plural(manifest.sources['num_files'], 'file')})",
        f"  tokenizer   {tokenizer.kind}, {tokenizer.vocab_size} ids, documents end with id {tokenizer.eod}",
    ]
    for name, split in manifest.splits.items():
        per_token = f" ({split.num_bytes / split.num_tokens:.2f} per token)" if split.num_tokens else ""
        lines.append(
            f"  {name:<11} {plural(split.num_documents, 'document')}, {plural(split.num_tokens, 'token')}, "
            f"{plural(split.num_bytes, 'byte')} of text{per_token}"
            + ("" if split.prompts is None else f"; scored are {plural(split.num_scored_tokens, 'token')} of answers")
        )
    lines.append(f"  left out    {plural(manifest.num_empty, 'empty document')}, {manifest.num_skipped:,} bad")
    lines += [f"    {example}" for example in manifest.skipped_examples]
    return "\n".join(lines)
