"""`megamem data prepare`: documents as token ids."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import DataError
from pretrain.printable import printable
from tools.common.parsers import add_command
from tools.common.words import plural
from tools.data.inputs import FIELD, add_input_arguments, reads_as_text
from tools.data.inspect import summary

if TYPE_CHECKING:
    from pretrain.data.conversations import MessagesField
    from pretrain.data.manifest import PreparedDataset
    from pretrain.data.sources import PairFields
    from pretrain.data.tokenizer import Tokenizer

_VALIDATION_FRACTION = 0.01
_FEW_DOCUMENTS = 10
_DOCUMENTS_READ_BACK, _CHARACTERS_OF_EACH = 64, 4096
_LEAST_LOST = 0.001
_EPILOG = """\
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
  megamem data prepare chat.jsonl --messages-field messages --tokenizer models/qwen --output data/chat
  megamem data prepare corpus/train --validation corpus/held-out --output data/mine

The output is a folder that `data.datasets` of a run configuration names by its path. It appears when it is complete: a
preparation that is killed leaves nothing that opens. The same command then continues, and repeats at most half a
minute of work. Asking for the same data set again does nothing.
"""


def add_prepare(commands: Any) -> None:
    """Adds `prepare` to the commands of `megamem data`."""
    parser = add_command(commands, "prepare", "tokenise documents into a data set to train on", _EPILOG)
    add_input_arguments(parser)
    parser.add_argument(
        "--prompt-field",
        metavar="KEY",
        help="JSON lines are pairs: this field is the prompt, whose tokens are read and not scored",
    )
    parser.add_argument("--answer-field", metavar="KEY", help="this field is the answer, which is scored")
    parser.add_argument(
        "--messages-field",
        metavar="KEY",
        help="JSON lines are conversations: this field is a list of messages, each with a role and its content, which the "
        "chat template of the tokenizer's folder makes a text; what the assistant says is scored, and nothing else",
    )
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
        help="token that ends a document (default: the one that the tokenizer's folder names, or else <|endoftext|>, </s>, "
        "<eos> or the like, if the vocabulary has just one)",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="text that reads as a special token, as a chat model's own markers do, is that token (default: text like all "
        "other, so that no document can forge one). With --messages-field: also in messages, which are bad documents otherwise; "
        "the template's own markers are always tokens",
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


def run_prepare(args: argparse.Namespace) -> int:
    """`megamem data prepare`. Raises DataError."""
    from pretrain.data.prepare import prepare

    if args.validation and args.validation_fraction != _VALIDATION_FRACTION:
        raise DataError("--validation names what is held out, so --validation-fraction has no effect: leave one out.")
    messages = _messages(args)
    started = time.monotonic()
    result = prepare(
        args.inputs,
        args.output,
        _tokenizer(args, messages),
        field_name=args.field,
        as_text=reads_as_text(args),
        pair=_pair(args),
        messages=messages,
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
    print(summary(result.dataset))
    if not result.was_already_there and (warning := _lost_warning(args, result.dataset)) is not None:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if messages is not None and (warning := _end_warning(result.dataset, messages)) is not None:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if trained := result.dataset.manifest.sources.get("num_held_out_trained"):
        print(
            f"warning: {plural(trained, 'held-out document')} of --validation among the others too: losses there are low "
            "because they are trained on",
            file=sys.stderr,
        )
    if (warning := _held_out_warning(result.dataset)) is not None:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    return 0


def _lost_warning(args: argparse.Namespace, dataset: PreparedDataset) -> str | None:
    """Warning if the tokenizer does not give back the text of the first documents."""
    from pretrain.data.lost_text import lost_text
    from pretrain.data.sources import BadDocumentLog, read_documents

    if args.prompt_field is not None or args.messages_field is not None:
        return None
    # What is bad was counted before.
    skipped = BadDocumentLog(limit=args.max_bad)
    texts = read_documents(args.inputs, field_name=args.field, as_text=reads_as_text(args), bad_documents=skipped)
    lost = lost_text(dataset.tokenizer, (text[:_CHARACTERS_OF_EACH] for text in islice(texts, _DOCUMENTS_READ_BACK)))
    if lost.share < _LEAST_LOST:
        return None
    example = "" if lost.example is None else f": {lost.example[0]!r} comes back as {lost.example[1]!r}"
    return (
        f"{lost.share:.1%} of the characters of the first documents do not come back from the tokenizer's ids{example}. A "
        "model of such ids never writes them; a byte-level tokenizer gives back every text."
    )


def _end_warning(dataset: PreparedDataset, messages: MessagesField) -> str | None:
    """Warning if models do not learn to end the assistant's turns."""
    from pretrain.data.conversations import ConversationReader

    reader = ConversationReader.open(dataset.tokenizer, messages)
    if reader.turn_end is None or reader.scores_ends:
        return None
    return (
        f"the assistant's turns end with {dataset.tokenizer.name_of(reader.turn_end)}, which the chat template's "
        "{% generation %} leaves out: models do not learn to write it. {% endgeneration %} behind it would."
    )


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
    remedy = "--cut-documents N makes documents of long texts, and " if held_out.unscored is None else ""
    one = " (one is more than half of it)" if held_out.num_documents > 1 and longest > held_out.num_tokens / 2 else ""
    return (
        f"{plural(held_out.num_documents, 'document')} of {held_out.num_bytes:,} bytes{one}, {share:.3g} of the text{asked}, "
        f"{'decides' if held_out.num_documents == 1 else 'decide'} every validation loss. {remedy}--validation INPUT names what is held out."
    )


def _pair(args: argparse.Namespace) -> PairFields | None:
    """The fields of prompts and answers, if they are asked for."""
    from pretrain.data.sources import PairFields

    if args.prompt_field is None and args.answer_field is None:
        return None
    if args.prompt_field is None or args.answer_field is None:
        raise DataError("--prompt-field and --answer-field name the two fields of one line: give both.")
    if args.field != FIELD:
        raise DataError("--field has no effect beside --prompt-field and --answer-field: leave it out.")
    return PairFields(args.prompt_field, args.answer_field)


def _messages(args: argparse.Namespace) -> MessagesField | None:
    """The field of conversations, if it is asked for."""
    from pretrain.data.conversations import MessagesField

    if args.messages_field is None:
        return None
    if args.prompt_field is not None or args.answer_field is not None:
        raise DataError("Lines are conversations by --messages-field, or pairs by --prompt-field: leave one out.")
    if args.field != FIELD:
        raise DataError("--field has no effect beside --messages-field: leave it out.")
    return MessagesField(args.messages_field, args.special_tokens)


def _tokenizer(args: argparse.Namespace, messages: MessagesField | None) -> Tokenizer:
    from pretrain.data.conversations import chat_tokenizer
    from pretrain.data.tokenizer import load_tokenizer

    if messages is not None:
        return chat_tokenizer(args.tokenizer, args.eod_token)
    return load_tokenizer(args.tokenizer, args.eod_token, special_tokens=args.special_tokens)
