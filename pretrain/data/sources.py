"""Documents from files: text, JSON lines, CSV, parquet, Arrow, arrays of codes, and Python sources of this machine.

Reading is split in two, so that the costly half can run in other processes:

1. `list_files` and `read_records` walk the inputs in a fixed order and cut them into undecoded records (a path, a line,
   a string);
2. `decode` turns a record into text, or names its fault.

`read_documents` is both in one process.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.data.columns import Row, arrow_rows, csv_rows, parquet_rows
from pretrain.data.contents import UNREADABLE, read_lines, read_whole
from pretrain.data.files import SourceFile, binary_kind, list_files
from pretrain.errors import DataError
from pretrain.printable import printable

_MAX_ARRAY_BYTES = 1 << 33
_MOST_OF_A_KEY = 80

_ROWS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    "csv": csv_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
}


class BadDocument(Exception):
    """A record that holds no usable text; the message says why."""


@dataclass(frozen=True)
class SourceRecord:
    """An undecoded document.

    `payload` is a line (bytes), a column's value (str, or None for null), a class and codes (str) or None for a text file,
    which `decode` reads itself. `failure` is set instead when the record or the file broke at this place. `file_bytes` is
    the progress through the file that this record stands for.
    """

    file: SourceFile
    row: int
    payload: bytes | str | None
    file_bytes: int
    failure: str | None = None

    @property
    def origin(self) -> str:
        """File and line or row of the record, as a person would look it up."""
        if self.row == 0:
            return printable(self.file.path)
        return f"{printable(self.file.path)}, {'line' if self.file.kind in ('json', 'csv') else 'row'} {self.row}"


@dataclass
class BadDocumentLog:
    """Count of the documents that are left out; it gives up past `limit` bad ones."""

    limit: int
    num_bad: int = 0
    examples: list[str] = field(default_factory=list)
    num_empty: int = 0

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise DataError(f"--max-bad {self.limit} is impossible: give 0 or more.")

    def add(self, origin: str, reason: str) -> None:
        """Count one bad document.

        Raises:
            DataError: the bad documents are more than `limit`.
        """
        self.num_bad += 1
        description = f"{printable(origin)}: {reason}"
        if self.num_bad > self.limit:
            if self.limit == 0:
                remedy = "Mend or remove it, or pass --max-bad N to skip and count up to N bad documents"
            else:
                remedy = (
                    f"This is bad document number {self.num_bad} and --max-bad is {self.limit}: "
                    "mend the input or raise it"
                )
            raise DataError(f"{description}. {remedy}.")
        if len(self.examples) < 20:
            self.examples.append(description)


def refuse_kinds(files: Sequence[SourceFile], bad_documents: BadDocumentLog) -> None:
    """Refuse files that no text can be read from before any is read, if they are more than may be left out.

    Raises:
        DataError: the files are more than may be left out.
    """
    refused = [(str(file.path), refusal) for file in files if (refusal := file.refusal) is not None]
    if len(refused) > bad_documents.limit:
        for path, refusal in refused:
            bad_documents.add(path, refusal)


def read_records(files: Sequence[SourceFile], field_name: str) -> Iterator[SourceRecord]:
    """Cut the files into records, in order. A file that breaks ends with one record that says so.

    The column `field_name` of a table is read; JSON lines are not looked into.
    """
    for file in files:
        if file.kind == "json":
            yield from _json_records(file)
        elif file.kind in _ROWS:
            yield from _table_records(file, field_name)
        elif file.kind == "codes":
            yield from _code_records(file)
        else:
            yield SourceRecord(file, 0, None, file.size_bytes, file.refusal)


def _json_records(file: SourceFile) -> Iterator[SourceRecord]:
    row, position = 0, 0
    try:
        for row, (line, next_position) in enumerate(read_lines(file.path), start=1):
            if line and not line.isspace():
                yield SourceRecord(file, row, line, next_position - position)
                position = next_position
    except UNREADABLE as error:
        yield SourceRecord(
            file, row + 1, None, file.size_bytes - position, failure=f"the file cannot be read on ({error})"
        )


def _table_records(file: SourceFile, field_name: str) -> Iterator[SourceRecord]:
    import pyarrow

    name, number = {"csv": "CSV", "parquet": "parquet", "arrow": "Arrow"}[file.kind], 0
    try:
        for row in _ROWS[file.kind](file.path, field_name):
            number = row.number
            yield SourceRecord(file, number, row.value, row.file_bytes, row.failure)
    except (*UNREADABLE, pyarrow.ArrowException) as error:
        # A damaged file has no row to point at until one was read.
        failure = f"the {name} file cannot be read{' on' if number else ''} ({error})"
        yield SourceRecord(file, number + 1 if number else 0, None, 0, failure=failure)


def _code_records(file: SourceFile) -> Iterator[SourceRecord]:
    """A document for every row of codes: its class and its codes, as `CodeTokenizer` reads them."""
    try:
        classes, codes = read_codes(file.path)
    except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile) as error:
        yield SourceRecord(file, 0, None, 0, failure=f"the arrays cannot be read ({error})")
        return
    bytes_per_row = file.size_bytes // max(1, len(codes))
    # Row by row: as Python's numbers, codes take some thirty times the room.
    for row, (label, sequence) in enumerate(zip(classes, codes, strict=True), start=1):
        yield SourceRecord(file, row, " ".join([f"c{label}", *map(str, sequence.tolist())]), bytes_per_row)


def read_codes(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Classes [N] and codes [N, L] of an .npz file.

    Raises:
        ValueError: the arrays are missing, not whole numbers from 0 on, or of other shapes.
    """
    with np.load(path, allow_pickle=False) as arrays:
        if missing := {"classes", "codes"} - set(arrays.files):
            raise ValueError(f"it has no array {min(missing)!r}, only {', '.join(sorted(arrays.files))}")
        unpacked = sum(entry.file_size for entry in arrays.zip.infolist()) if arrays.zip is not None else 0
        if unpacked > _MAX_ARRAY_BYTES:
            raise ValueError(f"unpacked it has {unpacked} bytes, and {_MAX_ARRAY_BYTES} are the most: divide it")
        classes, codes = arrays["classes"], arrays["codes"]
    for name, array in (("classes", classes), ("codes", codes)):
        if not np.issubdtype(array.dtype, np.integer) or (array.size and array.min() < 0):
            raise ValueError(f"its array {name!r} does not hold whole numbers from 0 on")
    if classes.ndim != 1 or codes.ndim != 2 or len(classes) != len(codes):
        raise ValueError(f"classes is {list(classes.shape)} and codes {list(codes.shape)}, not [N] and [N, L]")
    return classes, codes


@dataclass(frozen=True)
class PairFields:
    """The JSON fields of a prompt, which is read and not scored, and of the answer, which is learnt."""

    prompt: str
    answer: str


def decode_pair(record: SourceRecord, names: PairFields) -> tuple[str, str]:
    """Prompt and answer of a record (either may be empty).

    Raises:
        BadDocument: the record holds none.
    """
    if record.failure is not None:
        raise BadDocument(record.failure)
    assert isinstance(record.payload, bytes)
    fields = _json_object(record.payload, names.answer)
    prompt = checked(_field(fields, names.prompt, "--prompt-field"))
    return prompt, checked(_field(fields, names.answer, "--answer-field"))


def decode_messages(record: SourceRecord, field_name: str) -> list[dict[str, Any]]:
    """Messages of a record: one or more, each with a role.

    Raises:
        BadDocument: the record holds none.
    """
    if record.failure is not None:
        raise BadDocument(record.failure)
    assert isinstance(record.payload, bytes)
    messages = _value(_json_object(record.payload, field_name), field_name, "--messages-field")
    if not isinstance(messages, list):
        raise BadDocument(f"the field {field_name!r} holds {_kind(messages)}, not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadDocument(f"message {number} is {_kind(message)}, not an object with a role and its content")
        if not isinstance(message.get("role"), str):
            raise BadDocument(f"message {number} has no role (present: {_present(message)})")
    return messages


def decode(record: SourceRecord, field_name: str) -> str:
    """The text of a record (it may be empty).

    Raises:
        BadDocument: the record holds no usable text.
    """
    if record.failure is not None:
        raise BadDocument(record.failure)
    if record.file.kind in ("text", "raw"):
        text = _read_text(record.file)
    elif record.file.kind == "json":
        assert isinstance(record.payload, bytes)
        text = _decode_json(record.payload, field_name)
    else:
        # Null is no text, as it is in JSON.
        text = record.payload if isinstance(record.payload, str) else ""
    return checked(text)


def _read_text(file: SourceFile) -> str:
    try:
        content = read_whole(file.path)
    except UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadDocument(f"the file cannot be read ({reason})") from error
    if file.kind == "text" and (what := binary_kind(file.path, content)) is not None:
        raise BadDocument(what)
    return _decode_utf8(content)


def checked(text: str) -> str:
    """A text that holds no NUL. Raises BadDocument."""
    if "\0" in text:
        raise BadDocument(f"NUL at character {text.index(chr(0))}: this is not text")
    return text


def _decode_utf8(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(
            f"not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start}); if it is Latin-1, "
            "iconv -f LATIN1 -t UTF-8 converts it"
        ) from error


def _decode_json(line: bytes, field_name: str) -> str:
    return _field(_json_object(line, field_name), field_name, "--field")


def _json_object(line: bytes, field_name: str) -> dict[str, object]:
    try:
        value = json.loads(_decode_utf8(line), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        remedy = " (`jq -c '.[]'` of a list, or `jq -c .`, makes lines)" if line.strip() in (b"[", b"{", b"[{") else ""
        raise BadDocument(f"not valid JSON ({error}); every line must be one JSON object{remedy}") from error
    if not isinstance(value, dict):
        remedy = "; of a list of objects `jq -c '.[]'` makes lines" if isinstance(value, list) else ""
        raise BadDocument(f"{_kind(value)} where an object with the field {field_name!r} is wanted{remedy}")
    return value


def _present(fields: dict[str, object]) -> str:
    """Names of fields that are there, for messages."""
    return ", ".join(printable(key, _MOST_OF_A_KEY) for key in sorted(fields)[:8]) or "no fields"


def _value(value: dict[str, object], field_name: str, option: str) -> object:
    """Value of a field, or of a field in fields, as in `meta.text`."""
    fields, name = value, field_name
    while name not in fields and "." in name:
        outer, _, name = name.partition(".")
        inner = fields.get(outer)
        if not isinstance(inner, dict):
            break
        fields = inner
    if name not in fields:
        raise BadDocument(
            f"the field {field_name!r} is missing (present: {_present(fields)}); name the right one with {option}"
        )
    return fields[name]


def _field(value: dict[str, object], field_name: str, option: str) -> str:
    """Text of a field, see `_value`; null is an empty text."""
    text = _value(value, field_name, option)
    if text is None:
        return ""
    if not isinstance(text, str):
        within = f": name a field in it, as in {option} {field_name}.text" if isinstance(text, dict) else ""
        raise BadDocument(f"the field {field_name!r} holds {_kind(text)}, not a string{within}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(f"the field {field_name!r} holds half a surrogate pair, which is not text") from error
    return text


def _kind(value: object) -> str:
    """Kind of a value of JSON, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object without double keys: Python takes the last without a word, and other readers the first."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:_MOST_OF_A_KEY]!r} is given twice")
            seen.add(name)
    return value


def check_inputs_yielded(inputs: Sequence[str], num_documents_per_input: Sequence[int]) -> None:
    """Refuse inputs that yielded nothing: a silent zero is what a failed download looks like.

    Raises:
        DataError: an input yielded no document.
    """
    for name, num_documents in zip(inputs, num_documents_per_input, strict=True):
        if num_documents == 0:
            raise DataError(f"{name}: no document with text in it. Remove the input, or give one that is not empty.")


def read_documents(
    inputs: Sequence[str],
    *,
    field_name: str = "text",
    as_text: bool = False,
    bad_documents: BadDocumentLog | None = None,
) -> Iterator[str]:
    """Stream the texts of the non-empty documents of the inputs, in order, in this process.

    Args:
        inputs: files, directories, or names of `INSTALLED`.
        field_name: JSON field, or column of a table, that holds the text.
        as_text: every file is text, whatever its name says.
        bad_documents: counts what is skipped; None refuses the first bad document.

    Raises:
        DataError: a missing path, more bad documents than allowed, or an input without any document.
    """
    log = bad_documents or BadDocumentLog(limit=0)
    num_documents_per_input = [0] * len(inputs)
    files = list_files(inputs, as_text=as_text)
    refuse_kinds(files, log)
    for record in read_records(files, field_name):
        try:
            text = decode(record, field_name)
        except BadDocument as error:
            log.add(record.origin, str(error))
            continue
        if text and not text.isspace():
            num_documents_per_input[record.file.input_index] += 1
            yield text
    check_inputs_yielded(inputs, num_documents_per_input)
