"""Documents from files: plain text, JSON lines (plain, gzip, zstd), parquet, and Python sources of this machine.

Reading is split in two, so that the costly half can run in other processes:

1. `list_files` and `read_records` walk the inputs in a fixed order and cut them into undecoded records (a path, a line,
   a string);
2. `decode` turns a record into text, or says what is wrong with it.

`read_documents` is both in one process.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from pretrain.data.installed import INSTALLED
from pretrain.errors import DataError

_JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
_INSTALLED_NAMES = " or ".join(INSTALLED)
_READ_BYTES = 1 << 20
_MAX_LINE_BYTES = 256 << 20
_ROWS_PER_READ = 256


class BadDocument(Exception):
    """A record that holds no usable text; the message says why."""


@dataclass(frozen=True)
class SourceFile:
    """One input file. Size and modification time are those seen when the inputs were listed."""

    path: Path
    input_index: int
    kind: Literal["text", "json", "parquet"]
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Record:
    """An undecoded document.

    `payload` is a line (bytes), a parquet value (str, or None for null) or None for a text file, which `decode` reads
    itself. `failure` is set instead when the file itself broke at this place. `file_bytes` is the progress through the
    file that this record stands for.
    """

    file: SourceFile
    row: int
    payload: bytes | str | None
    file_bytes: int
    failure: str | None = None

    @property
    def origin(self) -> str:
        """Where the record is from, as a person would look it up."""
        if self.row == 0:
            return str(self.file.path)
        return f"{self.file.path}, {'row' if self.file.kind == 'parquet' else 'line'} {self.row}"


@dataclass
class BadDocumentLog:
    """Counts the documents that are left out, and gives up past `limit` bad ones."""

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
            DataError: there are more than `limit` of them.
        """
        self.num_bad += 1
        description = f"{origin}: {reason}"
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


def list_files(inputs: Sequence[str]) -> list[SourceFile]:
    """The files behind the inputs: each input in turn, a directory's files sorted by path.

    Names that start with a dot are left out inside directories, and links to directories are not followed.

    Raises:
        DataError: an input does not exist, or is a directory without files.
    """
    if not inputs:
        raise DataError(f"No input was given. Name files or directories, or {_INSTALLED_NAMES}.")
    files: list[SourceFile] = []
    for index, name in enumerate(inputs):
        paths = INSTALLED[name]() if name in INSTALLED else _paths_of(name)
        files.extend(_source_file(path, index) for path in paths)
    _refuse_doubles(files, inputs)
    return files


def _refuse_doubles(files: Sequence[SourceFile], inputs: Sequence[str]) -> None:
    """Links inside one directory may be meant; the same file behind two inputs is a slip."""
    seen: dict[Path, int] = {}
    for file in files:
        first = seen.setdefault(file.path.resolve(), file.input_index)
        if first != file.input_index:
            names = " and again in ".join(inputs[index] for index in (first, file.input_index))
            raise DataError(f"{file.path} is in {names}: its documents would count twice. Leave one out.")


def _source_file(path: Path, input_index: int) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Remove it from the inputs or mend it.") from error
    if not S_ISREG(stat.st_mode):
        raise DataError(
            f"{path}: a pipe or a device, which has neither a size nor a second reading: write it to a file first."
        )
    name = path.name.lower()
    kind: Literal["text", "json", "parquet"] = "text"
    if name.endswith(_JSON_SUFFIXES):
        kind = "json"
    elif name.endswith(".parquet"):
        kind = "parquet"
    return SourceFile(path, input_index, kind, stat.st_size, stat.st_mtime_ns)


def _paths_of(name: str) -> list[Path]:
    root = Path(name)
    if root.exists() and not root.is_dir():
        return [root]
    if not root.is_dir():
        raise DataError(
            f"{name}: no such file or directory. Give an existing path, or {_INSTALLED_NAMES} for sources of this machine."
        )
    paths: list[Path] = []
    for folder, subfolders, file_names in os.walk(root):
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith(".")]
        paths.extend(Path(folder, file_name) for file_name in file_names if not file_name.startswith("."))
    if not paths:
        raise DataError(f"{name}: the directory holds no files. Give a directory with text, .jsonl or .parquet files.")
    return sorted(paths)


def read_records(files: Sequence[SourceFile], field_name: str) -> Iterator[Record]:
    """Cut the files into records, in order. A file that breaks ends with one record that says so.

    Of a parquet file the column `field_name` is read, and JSON lines are not looked into.
    """
    for file in files:
        if file.kind == "json":
            yield from _json_records(file)
        elif file.kind == "parquet":
            yield from _parquet_records(file, field_name)
        else:
            yield Record(file, 0, None, file.size_bytes)


def _json_records(file: SourceFile) -> Iterator[Record]:
    row, position = 0, 0
    try:
        for row, (line, next_position) in enumerate(_lines(file.path), start=1):
            if row == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line and not line.isspace():
                yield Record(file, row, line, next_position - position)
                position = next_position
    except (OSError, EOFError, zlib.error, ValueError) as error:
        yield Record(file, row + 1, None, file.size_bytes - position, failure=f"the file cannot be read on ({error})")


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines without their newline, each with the position reached in the file (bytes, compressed where it is)."""
    with path.open("rb") as stream:
        rest = b""
        for content in _contents(path, stream):
            *lines, rest = (rest + content).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise ValueError(f"a line is longer than {_MAX_LINE_BYTES >> 20} MiB; is this JSON lines?")
            position = stream.tell()
            for line in lines:
                yield line, position
        if rest:
            yield rest, stream.tell()


def _contents(path: Path, stream: BufferedReader) -> Iterator[bytes]:
    """What the file holds, decompressed, read by read."""
    name = path.name.lower()
    if name.endswith(".zst"):
        yield from _zstd_contents(stream)
        return
    reader = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
    if name.endswith(".gz") and path.stat().st_size == 0:
        raise EOFError("an empty file is not a gzip archive")
    # read1, because read would throw away what it had decompressed when it meets the break in a truncated file.
    while content := reader.read1(_READ_BYTES):
        yield content


def _zstd_contents(stream: BufferedReader) -> Iterator[bytes]:
    # The package's own stream reader takes a truncated file for a complete one, so frames are followed by hand.
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = decompressor.decompressobj()
    while compressed := stream.read(_READ_BYTES // 16):
        while compressed:
            if frame.eof:
                frame = decompressor.decompressobj()
            try:
                yield frame.decompress(compressed)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            compressed = frame.unused_data
    if not frame.eof:
        raise EOFError("the zstd stream ends before its end marker: it is truncated")


def _parquet_records(file: SourceFile, field_name: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if field_name not in names:
                raise ValueError(f"it has no column {field_name!r}, only {', '.join(names)}: name one with --field")
            kind = table.schema_arrow.field(field_name).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ValueError(f"its column {field_name!r} holds {kind}, not strings: name another with --field")
            bytes_per_row = file.size_bytes // max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=_ROWS_PER_READ, columns=[field_name], use_threads=False):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield Record(file, row, value, bytes_per_row)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # A damaged file has no row to point at until one was read.
        yield Record(file, row + 1 if row else 0, None, 0, failure=f"the parquet file cannot be read ({error})")


@dataclass(frozen=True)
class PairFields:
    """The JSON fields of a prompt, which is read and not scored, and of the answer, which is learnt."""

    prompt: str
    answer: str


def decode_pair(record: Record, names: PairFields) -> tuple[str, str]:
    """Prompt and answer of a record (either may be empty).

    Raises:
        BadDocument: the record holds none.
    """
    if record.failure is not None:
        raise BadDocument(record.failure)
    assert isinstance(record.payload, bytes)
    fields = _json_object(record.payload, names.answer)
    prompt = _checked(_field(fields, names.prompt, "--prompt-field"))
    return prompt, _checked(_field(fields, names.answer, "--answer-field"))


def decode(record: Record, field_name: str) -> str:
    """The text of a record (it may be empty).

    Raises:
        BadDocument: the record holds no usable text.
    """
    if record.failure is not None:
        raise BadDocument(record.failure)
    if record.file.kind == "text":
        try:
            text = _decode_utf8(record.file.path.read_bytes())
        except OSError as error:
            raise BadDocument(f"the file cannot be read ({error.strerror})") from error
    elif record.file.kind == "json":
        assert isinstance(record.payload, bytes)
        text = _decode_json(record.payload, field_name)
    else:
        if not isinstance(record.payload, str):
            raise BadDocument(f"the column {field_name!r} is null here")
        text = record.payload
    return _checked(text)


def _checked(text: str) -> str:
    if "\0" in text:
        raise BadDocument(f"NUL at character {text.index(chr(0))}: this is not text")
    return text


def _decode_utf8(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(f"not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start})") from error


def _decode_json(line: bytes, field_name: str) -> str:
    return _field(_json_object(line, field_name), field_name, "--field")


def _json_object(line: bytes, field_name: str) -> dict[str, object]:
    try:
        value = json.loads(_decode_utf8(line), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"not valid JSON ({error}); every line must be one JSON object") from error
    if not isinstance(value, dict):
        raise BadDocument(f"a JSON {type(value).__name__} where an object with the field {field_name!r} is wanted")
    return value


def _field(value: dict[str, object], field_name: str, option: str) -> str:
    if field_name not in value:
        present = ", ".join(sorted(value)[:8]) or "no fields"
        raise BadDocument(f"the field {field_name!r} is missing (present: {present}); name the right one with {option}")
    text = value[field_name]
    if not isinstance(text, str):
        raise BadDocument(f"the field {field_name!r} holds {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(f"the field {field_name!r} holds half a surrogate pair, which is not text") from error
    return text


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Of a key that is there twice, Python would take the last without a word, and others the first."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"the key {double!r} is given twice")
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
    inputs: Sequence[str], *, field_name: str = "text", bad_documents: BadDocumentLog | None = None
) -> Iterator[str]:
    """Stream the texts of the non-empty documents of the inputs, in order, in this process.

    Args:
        inputs: files, directories, or names of `INSTALLED`.
        field_name: JSON field or parquet column that holds the text.
        bad_documents: counts what is skipped; None refuses the first bad document.

    Raises:
        DataError: a missing path, more bad documents than allowed, or an input without any document.
    """
    log = bad_documents or BadDocumentLog(limit=0)
    num_documents_per_input = [0] * len(inputs)
    for record in read_records(list_files(inputs), field_name):
        try:
            text = decode(record, field_name)
        except BadDocument as error:
            log.add(record.origin, str(error))
            continue
        if text:
            num_documents_per_input[record.file.input_index] += 1
            yield text
    check_inputs_yielded(inputs, num_documents_per_input)
