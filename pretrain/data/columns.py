"""One column of a table, row by row: CSV and TSV, parquet, and Arrow's two formats."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pretrain.data.contents import MAX_LINE_BYTES, ending_of, read_lines

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_READ = 256
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class Row(NamedTuple):
    """A row's value in the column.

    Attributes:
        number: number of the row, from 1 on; of CSV the line that it begins in.
        value: None where it is null, or where the row is broken.
        file_bytes: progress through the file that the row stands for.
        failure: reason why the row is broken.
    """

    number: int
    value: str | None
    file_bytes: int
    failure: str | None = None


def csv_rows(path: Path, column: str) -> Iterator[Row]:
    """Rows under the header of a CSV file, or of a TSV file if that is its name; line breaks within quotes are text.

    Raises:
        UNREADABLE: the file cannot be read on, or its header has no such column.
    """
    # Python's own limit of a field is 128 KiB.
    csv.field_size_limit(MAX_LINE_BYTES)
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        for line, reached in read_lines(path):
            position = reached
            # Bytes that are not UTF-8 spoil their row, and not the file.
            yield f"{line.decode('utf-8', 'surrogateescape')}\n"

    reader = csv.reader(lines(), delimiter="\t" if ending_of(path) == ".tsv" else ",", strict=True)
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise ValueError(f"its header is not valid CSV ({_explained(error)})") from error
    if header is None:
        return
    place, before = _place_of(header, column), 0
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
            failure = _row_failure(fields, header, place) if fields else None
        except StopIteration:
            return
        except csv.Error as error:
            fields, failure = [], f"not valid CSV ({_explained(error)})"
        if fields or failure:
            yield Row(number, None if failure else fields[place], position - before, failure)
            before = position


def _place_of(header: Sequence[str], column: str) -> int:
    if (times := header.count(column)) == 1:
        return header.index(column)
    if times:
        raise ValueError(f"its header has the column {column!r} {times} times: rename them")
    raise _no_column(column, header)


def _no_column(column: str, names: Sequence[str]) -> ValueError:
    return ValueError(f"it has no column {column!r}, only {', '.join(names)}: name one with --field")


def _row_failure(fields: Sequence[str], header: Sequence[str], place: int) -> str | None:
    if len(fields) != len(header):
        return f"{len(fields)} field{'s' * (len(fields) != 1)}, and the header has {len(header)}"
    try:
        fields[place].encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(fields[place][error.start]) - 0xDC00
        return f"not UTF-8 text (byte 0x{byte:02x} at character {error.start})"
    return None


def _explained(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a quote that is opened here is never closed"
    if "new-line character" in str(error):
        return "a carriage return in a field without quotes"
    return str(error)


def parquet_rows(path: Path, column: str) -> Iterator[Row]:
    """Rows of a parquet file.

    Raises:
        ArrowException, OSError, ValueError: the file cannot be read on, or has no such column of strings, in structs or
            not.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        names = _path_of(table.schema_arrow, column)
        file_bytes = path.stat().st_size // max(1, table.metadata.num_rows)
        number = 0
        for batch in table.iter_batches(batch_size=_ROWS_PER_READ, columns=[".".join(names)], use_threads=False):
            for value in _values(batch, names).to_pylist():
                number += 1
                yield Row(number, value, file_bytes)


def arrow_rows(path: Path, column: str) -> Iterator[Row]:
    """Rows of an Arrow file: in the streaming format, as `datasets` saves it, or the file format (Feather).

    Raises:
        ArrowException, OSError, ValueError: the file cannot be read on, or has no such column of strings, in structs or
            not.
    """
    import pyarrow

    number = 0
    with pyarrow.memory_map(str(path)) as source:
        for values, file_bytes in _arrow_batches(source, column):
            for start in range(0, len(values), _ROWS_PER_READ):
                for value in values.slice(start, _ROWS_PER_READ).to_pylist():
                    number += 1
                    yield Row(number, value, file_bytes)
                    # The batch's bytes are counted once.
                    file_bytes = 0


def _arrow_batches(source: pyarrow.NativeFile, column: str) -> Iterator[tuple[pyarrow.Array, int]]:
    """Batches of one column's values, mapped, each with its bytes of the file."""
    import pyarrow

    size, options = source.size(), pyarrow.ipc.IpcReadOptions(use_threads=False)
    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    if is_file:
        table = pyarrow.ipc.open_file(source, options=options)
        names = _path_of(table.schema, column)
        for index in range(table.num_record_batches):
            yield _values(table.get_batch(index), names), size // table.num_record_batches
        return
    source.seek(max(0, size - len(_ARROW_STREAM_END)))
    is_whole = source.read() == _ARROW_STREAM_END
    source.seek(0)
    stream, before = pyarrow.ipc.open_stream(source, options=options), 0
    names = _path_of(stream.schema, column)
    for batch in stream:
        yield _values(batch, names), source.tell() - before
        before = source.tell()
    # The reader takes a file that was cut off between two batches for a complete one.
    if not is_whole:
        raise EOFError("the stream ends without its end marker: it is truncated, or its writer was never closed")


def _path_of(schema: pyarrow.Schema, column: str) -> tuple[str, ...]:
    """Names of a column of strings, or of one in structs, as in `meta.text`, from the outermost on.

    Raises:
        ValueError: the column is missing, or holds something else.
    """
    import pyarrow

    fields, path, rest = {field.name: field.type for field in schema}, list[str](), column
    while rest not in fields:
        outer, dot, rest = rest.partition(".")
        kind = fields.get(outer)
        if not dot or kind is None:
            raise _no_column(column, [".".join((*path, name)) for name in fields])
        path.append(outer)
        if not pyarrow.types.is_struct(kind):
            raise ValueError(
                f"its column {'.'.join(path)!r} holds {kind}, in which nothing has a name: name another with --field"
            )
        fields = {field.name: field.type for field in kind}
    kind = fields[rest]
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(check(values) for check in is_text):
        within = next((f"{column}.{field.name}" for field in kind), "") if pyarrow.types.is_struct(kind) else ""
        advice = f"name a field in it, as in --field {within}" if within else "name another with --field"
        raise ValueError(f"its column {column!r} holds {kind}, not strings: {advice}")
    return (*path, rest)


def _values(batch: pyarrow.RecordBatch, path: Sequence[str]) -> pyarrow.Array:
    """Values of a column, or of one in structs; null where a struct around it is null."""
    import pyarrow.compute

    outer, *inner = path
    values = batch.column(outer)
    return pyarrow.compute.struct_field(values, inner) if inner else values
