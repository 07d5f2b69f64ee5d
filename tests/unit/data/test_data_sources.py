"""Reading documents, and what every kind of broken input says."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import contents
from pretrain.data.files import list_files
from pretrain.data.prepare import prepare
from pretrain.data.sources import BadDocumentLog, read_documents, read_records
from pretrain.data.tokenizer import ByteTokenizer
from pretrain.errors import DataError


def texts(*inputs: Path | str, **options) -> list[str]:
    return list(read_documents([str(path) for path in inputs], **options))


def write_json_lines(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, columns: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def write_csv(path: Path, columns: dict[str, Sequence[object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_arrow(path: Path, columns: dict, rows_per_batch: int = 3) -> Path:
    """Write the streaming format, or that of files if the name is `.feather`."""
    table = pyarrow.table(columns)
    new = pyarrow.ipc.new_file if path.suffix == ".feather" else pyarrow.ipc.new_stream
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def test_blanks_are_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "   ", "", "\n\t\u00a0", "two ")))
    assert texts(path) == ["one", "two "]
    prepared = prepare([str(path)], tmp_path / "out", ByteTokenizer(), validation_fraction=0, num_workers=1).dataset
    assert prepared.manifest.splits["train"].num_documents == 2
    assert prepared.manifest.num_empty == 3


def test_directory_is_read_recursively_in_path_order_without_hidden_files(tmp_path: Path):
    for name in ("b.txt", "a/z.py", "a/.hidden", ".git/config", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/z.py", "b.txt", "c.md"]


def test_inputs_keep_the_order_they_were_given_in(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "two", tmp_path / "one") == ["two", "one"]


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
            lambda text: not text.isspace()
        ),
        min_size=1,
    )
)
def test_all_containers_give_the_same_documents(documents: list[str], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("containers")
    plain = write_json_lines(folder / "a.jsonl", documents)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    # Two zstd frames in a row, as `cat a.zst b.zst` makes.
    half = len(plain.read_bytes()) // 2
    frames = [zstandard.compress(part) for part in (plain.read_bytes()[:half], plain.read_bytes()[half:])]
    (folder / "a.jsonl.zst").write_bytes(b"".join(frames))
    (folder / "a.ndjson.xz").write_bytes(b"".join(map(lzma.compress, plain.read_bytes().splitlines(keepends=True))))
    write_parquet(folder / "a.parquet", {"text": documents})
    columns = {"id": list(range(len(documents))), "text": documents}
    for name in ("a.csv", "a.tsv"):
        write_csv(folder / name, columns)
    (folder / "a.tsv.bz2").write_bytes(bz2.compress((folder / "a.tsv").read_bytes()))
    for name in ("a.arrow", "a.feather"):
        write_arrow(folder / name, columns)
    paths = sorted(folder.iterdir())
    assert len(paths) == 10
    for path in paths:
        assert texts(path) == documents, path.name
        # Progress ends where the files end, or a rounded row before.
        files = list_files([str(path)])
        read = sum(record.file_bytes for record in read_records(files, "text"))
        assert 0 <= files[0].size_bytes - read < max(len(documents), 30), path.name


def test_byte_order_mark_blank_lines_and_missing_final_newline_are_fine(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert texts(path) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.csv", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str):
    text = {"a.csv": "text\r\none\r\n", "a.json": '{"text": "one"}'}.get(name, "one")
    content = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert texts(tmp_path / name) == ["one"]


def test_rows_of_csv_are_named_by_the_line_that_they_begin_in(tmp_path: Path):
    path = write_csv(tmp_path / "a.csv", {"id": [1, 2, 3], "text": ["a", 'b\nb "c",\r\nd', "e"]})
    path.write_bytes(path.read_bytes().replace(b"3,e", b"\r\n3,e"))
    records = list(read_records(list_files([str(path)]), "text"))
    assert [record.origin for record in records] == [f"{path}, line {line}" for line in (2, 3, 7)]
    assert [record.payload for record in records] == ["a", 'b\nb "c",\r\nd', "e"]


BAD_ROWS = {
    b"2,x,y": "3 fields, and the header has 2",
    b"2": "1 field, and the header has 2",
    b'2,"x"y': "not valid CSV (',' expected after '\"')",
    b"2,\xe4": "not UTF-8 text (byte 0xe4 at character 0)",
    b"2,x\0": "NUL at character 1: this is not text",
    b"2,x\ry": "not valid CSV (a carriage return in a field without quotes)",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_bad_row_of_csv_is_named_and_can_be_skipped(tmp_path: Path, row: bytes, reason: str):
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,one\n" + row + b"\n3,two\n")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}, line 3: {reason}. ")
    assert "--max-bad" in str(caught.value)
    assert texts(path, bad_documents=BadDocumentLog(limit=1)) == ["one", "two"]


def test_a_quote_that_is_never_closed_is_found_where_it_opens(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,one\n2,"two\n' + "3,three\n" * 5)
    with pytest.raises(
        DataError, match=r"a\.csv, line 3: not valid CSV \(a quote that is opened here is never closed\)"
    ):
        texts(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("id,body", "it has no column 'text', only id, body: name one with --field"),
        ("text,text", "its header has the column 'text' 2 times: rename them"),
        ('"text"x,id', "its header is not valid CSV"),
    ],
)
def test_header_of_csv(tmp_path: Path, header: str, reason: str):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n1,one\n")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}: the CSV file cannot be read ({reason}")


def test_long_fields_of_csv(tmp_path: Path):
    """Past the limit that Python's reader has by itself."""
    long = "word\n" * 60_000
    assert texts(write_csv(tmp_path / "a.csv", {"text": [long, "x"]})) == [long, "x"]


def test_folders_of_datasets_are_read_and_what_describes_them_is_not(tmp_path: Path):
    # A second of imports, and only here.
    import datasets

    rows = [f"row {i}" for i in range(7)]
    saved = datasets.Dataset.from_dict({"text": rows, "id": list(range(7))})
    saved.save_to_disk(tmp_path / "saved", num_shards=2)
    # Kept there by the library when a data set is mapped: the same rows once more.
    write_arrow(tmp_path / "saved" / "cache-1.arrow", {"text": ["computed"]})
    assert texts(tmp_path / "saved") == rows
    (tmp_path / "saved" / "state.json").unlink()
    assert texts(tmp_path / "saved") == rows
    splits = {"train": saved.select(range(5)), "test": saved.select(range(5, 7))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "splits" / "train") == rows[:5]
    with pytest.raises(DataError, match=r"splits holds the splits test, train: .*/train --validation .*/test\."):
        texts(tmp_path / "splits")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "one")
    assert texts(tmp_path / "one") == rows
    (tmp_path / "one" / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"one/train: data-00000-of-00001\.arrow is missing, which state\.json lists"):
        texts(tmp_path / "one")


def test_an_arrow_stream_that_was_cut_off_is_an_error_and_not_a_short_corpus(tmp_path: Path):
    rows = [f"row {i}" for i in range(10)]
    whole = write_arrow(tmp_path / "a.arrow", {"text": rows}).read_bytes()
    path = tmp_path / "b.arrow"
    short = write_arrow(tmp_path / "c.arrow", {"text": rows[:6]}).read_bytes()
    # Two batches, and nothing behind them: only the end marker is missing.
    path.write_bytes(short[:-8])
    with pytest.raises(
        DataError, match=r"b\.arrow, row 7: the Arrow file cannot be read on \(the stream ends without its"
    ):
        texts(path)
    for kept in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(DataError, match=r"b\.arrow.*: the Arrow file cannot be read"):
            texts(path)
    log = BadDocumentLog(limit=1)
    path.write_bytes(short[:-8])
    assert texts(path, tmp_path / "c.arrow", bad_documents=log) == [*rows[:6], *rows[:6]]
    assert log.num_bad == 1


@pytest.mark.parametrize("name", ["a.arrow", "a.feather"])
def test_columns_of_arrow(tmp_path: Path, name: str):
    path = write_arrow(tmp_path / name, {"id": [1, 2], "body": ["x", None]})
    with pytest.raises(DataError, match="no column 'text', only id, body: name one with --field"):
        texts(path)
    with pytest.raises(DataError, match="column 'id' holds int64, not strings"):
        texts(path, field_name="id")
    assert texts(path, field_name="body") == ["x"]
    others = [pyarrow.array(["x", "y"]).dictionary_encode(), pyarrow.array(["x", "y"], pyarrow.string_view())]
    for column in others:
        assert texts(write_arrow(tmp_path / name, {"text": column})) == ["x", "y"]


REFUSED = {
    "page.html": "HTML, and not text: extract its text first, or pass --text",
    "page.HTM.gz": "HTML, and not text",
    "paper.pdf": "a PDF: extract its text first",
    "letter.docx": "no plain text",
    "all.tar.gz": "an archive of files: unpack it",
    "all.zip": "an archive of files: unpack it",
    "a.parquet.gz": "compressed, and no text or lines inside: unpack it",
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_hold_no_plain_text_are_refused_before_any_is_read(tmp_path: Path, name: str):
    (tmp_path / "a.jsonl").write_text("broken")
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / name
    path.write_text("<html>")
    with pytest.raises(DataError) as caught:
        texts(tmp_path)
    assert str(caught.value).startswith(f"{path}: {REFUSED[name]}")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    log = BadDocumentLog(limit=1)
    assert texts(tmp_path, bad_documents=log) == ["one"]
    assert log.num_bad == 1


HEADS = {
    "a.txt": (b"%PDF-1.7 ...", "a PDF"),
    "b.txt": (b"PK\x03\x04...", "a zip archive"),
    "c": (b"  \n<!DOCTYPE html>\n<html>", "HTML, and not text"),
    "d": (gzip.compress(b"text"), "compressed with gzip: give its name the ending .gz"),
    "e": (b"\0" * 257 + b"ustar", "an archive of files"),
    "f.txt": ("text".encode("utf-16"), "UTF-16, and UTF-8 is read"),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_a_name_does_not_say_the_first_bytes_say(tmp_path: Path, name: str):
    content, reason = HEADS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: {reason}"):
        texts(tmp_path / name)


def test_who_means_it_has_every_file_as_the_text_that_it_is(tmp_path: Path):
    contents = {
        "a.html": "<html>",
        "b.csv": "id,text\n1,x\n",
        "c.json": "{\n}",
        "d": "<html>",
        "e.py": "<!doctype html>",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    assert texts(tmp_path, as_text=True) == list(contents.values())
    assert texts(tmp_path / "e.py") == ["<!doctype html>"]
    (tmp_path / "f.pdf").write_bytes(b"%PDF\0")
    with pytest.raises(DataError, match=r"f\.pdf: NUL at character 4"):
        texts(tmp_path, as_text=True)


def test_a_list_in_one_piece_says_how_to_make_lines_of_it(tmp_path: Path):
    for content in ('[{"text": "a"}]', '[\n  {"text": "a"}\n]'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=r"a\.json, line 1: .*`jq -c '\.\[\]'`"):
            texts(tmp_path / "a.json")


def test_origins_name_file_and_line_or_row(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    table = write_parquet(tmp_path / "b.parquet", {"text": ["x", "y"]})
    origins = [record.origin for record in read_records(list_files([str(lines), str(table)]), "text")]
    assert origins == [f"{lines}, line 1", f"{lines}, line 3", f"{table}, row 1", f"{table}, row 2"]


def test_another_field_can_be_named(tmp_path: Path):
    path = write_json_lines(tmp_path / "a.jsonl", ["x"], field="content")
    assert texts(path, field_name="content") == ["x"]


BAD_LINES = {
    b'{"text": "a"': "not valid JSON",
    b"\xff\xfe\x00junk": "not UTF-8 text (byte 0xff at offset 0)",
    b"caf\xe9": "(byte 0xe9 at offset 3); if it is Latin-1, iconv -f LATIN1 -t UTF-8 converts it",
    b'["text"]': "a list where an object",
    b'"text"': "a string where an object",
    b'{"content": "a"}': "the field 'text' is missing (present: content)",
    b'{"text": 3}': "holds a number, not a string",
    b'{"text": true}': "holds true or false, not a string",
    b'{"text": {"en": "a"}}': "holds an object, not a string: name a field in it, as in --field text.text",
    b'{"\\u001b[2J\\n\\ud800": "a"}': r"(present: \x1b[2J\n\ud800)",
    b'{"' + b"k" * 500 + b'": "a"}': f"(present: {'k' * 77}...)",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b'{"text": "a\\u0000"}': "NUL at character 1",
    b"[" * 100_000: "not valid JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_bad_line_is_named_and_can_be_skipped(tmp_path: Path, line: bytes, reason: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(DataError) as caught:
        texts(path)
    message = str(caught.value)
    assert f"{path}, line 2: " in message
    assert reason in message
    assert "--max-bad" in message
    log = BadDocumentLog(limit=1)
    assert texts(path, bad_documents=log) == ["one", "two"]
    assert log.num_bad == 1
    assert reason in log.examples[0]


def test_too_many_bad_lines_say_how_many(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{\n{\n')
    with pytest.raises(DataError, match=r"line 3: .*bad document number 2 and --max-bad is 1"):
        texts(path, bad_documents=BadDocumentLog(limit=1))


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\x7fELF\x00\x01", "NUL at character 4"), (b"abc\xff", "byte 0xff at offset 3")]
)
def test_binary_junk_is_not_text(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "program"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        texts(path)


@pytest.mark.parametrize("suffix", ["gz", "zst", "xz", "bz2"])
@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_truncated_archive_is_an_error_and_not_a_short_corpus(tmp_path: Path, suffix: str, kept: int):
    content = "".join(json.dumps({"text": f"document {i} {hash(i * 7919)}"}) + "\n" for i in range(1000)).encode()
    compress = {"gz": gzip.compress, "zst": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress}[suffix]
    for name in (f"a.jsonl.{suffix}", f"a.txt.{suffix}"):
        (tmp_path / name).write_bytes(compress(content)[:kept])
        with pytest.raises(DataError, match=rf"{name}.*the file cannot be read"):
            texts(tmp_path / name)


@pytest.mark.parametrize("suffix", ["gz", "zst", "xz", "bz2"])
def test_junk_in_an_archive(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(b"this is no archive at all")
    with pytest.raises(DataError, match="the file cannot be read on"):
        texts(path)


def test_skipping_a_truncated_archive_keeps_what_came_before_and_after(tmp_path: Path):
    first, second = tmp_path / "1.jsonl.gz", tmp_path / "2.jsonl"
    lines = b'{"text": "a"}\n' * 100_000
    first.write_bytes(gzip.compress(lines, 1)[:-1])
    write_json_lines(second, ["last"])
    log = BadDocumentLog(limit=1)
    assert texts(first, second, bad_documents=log) == ["a"] * 100_000 + ["last"]
    assert log.num_bad == 1


@pytest.mark.parametrize("content", [b"", b"PAR1", b"junk" * 100])
def test_unreadable_parquet(tmp_path: Path, content: bytes):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: the parquet file cannot be read"):
        texts(path)


def test_parquet_damaged_in_the_middle(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [str(hash(i)) for i in range(5000)]})
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="the parquet file cannot be read"):
        texts(path)


def test_parquet_column_must_exist_and_hold_strings(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "body": ["x", "y"]})
    with pytest.raises(DataError, match="no column 'text', only id, body: name one with --field"):
        texts(path)
    with pytest.raises(DataError, match="column 'id' holds int64, not strings"):
        texts(path, field_name="id")
    assert texts(path, field_name="body") == ["x", "y"]


def test_null_is_an_empty_document(tmp_path: Path):
    tables = [write_parquet(tmp_path / "a.parquet", {"text": ["x", None, "y"]})]
    tables.append(write_arrow(tmp_path / "a.arrow", {"text": ["x", None, "y"]}))
    tables.append(tmp_path / "a.jsonl")
    tables[-1].write_text('{"text": "x"}\n{"text": null}\n{"text": "y"}\n')
    for table in tables:
        assert texts(table) == ["x", "y"]
        prepared = prepare([str(table)], tmp_path / f"{table.suffix}.out", ByteTokenizer(), num_workers=1)
        assert prepared.dataset.manifest.num_empty == 1
    tables[-1].write_text('{"text": null}\n')
    with pytest.raises(DataError, match="no document with text in it"):
        texts(tables[-1])


def test_a_field_may_be_one_of_a_field(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    line = {"a": {"b": {"c": "deep", "d.e": "dotted"}}, "a.b": "whole", "n": {"t": None}}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "n": {"t": "x"}}) + "\n")
    for name, text in (("a.b.c", "deep"), ("a.b.d.e", "dotted"), ("a.b", "whole")):
        assert texts(path, field_name=name) == [text, text]
    assert texts(path, field_name="n.t") == ["x"]
    with pytest.raises(DataError, match=r"the field 'a\.x\.c' is missing \(present: b\)"):
        texts(path, field_name="a.x.c")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_a_column_may_be_one_of_a_struct(tmp_path: Path, name: str):
    """A null struct has no text, whatever is stored in its place; other columns and fields stay where they are."""
    inner = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["deep", "hidden", None, "é"]), pyarrow.array([1, 2, 3, 4])],
        ["c", "d.e"],
        mask=pyarrow.array([False, True, False, False]),
    )
    columns = {
        "id": [1, 2, 3, 4],
        "a": pyarrow.StructArray.from_arrays([inner, pyarrow.array(["p", "q", "r", "s"])], ["b", "d.e"]),
        "a.b": ["whole", "names", "come", "first"],
        "l": [[{"t": "x"}]] * 4,
    }
    path = (write_parquet if name == "a.parquet" else write_arrow)(tmp_path / name, columns)
    assert texts(path, field_name="a.b.c") == ["deep", "é"]
    assert texts(path, field_name="a.d.e") == ["p", "q", "r", "s"]
    assert texts(path, field_name="a.b") == ["whole", "names", "come", "first"]
    for field_name, problem in {
        "a.b.x": r"has no column 'a\.b\.x', only a\.b\.c, a\.b\.d\.e: name one with --field",
        "a": r"its column 'a' holds struct<.*>, not strings: name a field in it, as in --field a\.b",
        "a.b.d.e": r"its column 'a\.b\.d\.e' holds int64, not strings: name another",
        "l.t": r"its column 'l' holds list<.*>, in which nothing has a name",
        "id.x": r"its column 'id' holds int64, in which nothing has a name",
        "x.y": r"has no column 'x\.y', only id, a, a\.b, l: name one",
    }.items():
        with pytest.raises(DataError, match=problem):
            texts(path, field_name=field_name)


def test_a_line_of_many_keys_takes_as_long_as_it_is(tmp_path: Path):
    """A search for each key among those before it would take 10^10 steps."""
    path = tmp_path / "a.jsonl"
    keys = "".join(f'"{number}": 0, ' for number in range(100_000))
    path.write_text(f'{{{keys}"text": "a", "99999": 0}}\n')
    with pytest.raises(DataError, match="the key '99999' is given twice"):
        texts(path)


@pytest.mark.parametrize("ending", ["gz", "xz", "bz2", "zst"])
def test_a_compressed_document_has_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str):
    monkeypatch.setattr(contents, "MAX_UNPACKED_BYTES", 8 << 20)
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstandard.compress}[ending]
    path = tmp_path / f"a.txt.{ending}"
    path.write_bytes(pack(b"a" * (8 << 20)))
    assert len(texts(path)[0]) == 8 << 20
    path.write_bytes(pack(b"a" * (128 << 20)))
    tracemalloc.start()
    with pytest.raises(DataError, match="longer than 8 MiB unpacked, and one document: unpack it, or make JSON lines"):
        texts(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_empty_file_given_by_name_is_an_error(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "full.txt").write_text("x")
    with pytest.raises(DataError, match=rf"{name}: no document with text"):
        texts(tmp_path / name, tmp_path / "full.txt")


def test_empty_documents_among_others_are_left_out(tmp_path: Path):
    path = write_json_lines(tmp_path / "a.jsonl", ["x", "", "y"])
    assert texts(path) == ["x", "y"]


def test_empty_directory_and_missing_path(tmp_path: Path):
    with pytest.raises(DataError, match="holds no files"):
        texts(tmp_path)
    with pytest.raises(DataError, match=r"nowhere: no such file or directory.*python-stdlib"):
        texts(tmp_path / "nowhere")
    with pytest.raises(DataError, match="No input was given"):
        list_files([])


def test_dangling_link(tmp_path: Path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt: cannot be read"):
        texts(tmp_path)


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in (tmp_path / "pipe.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"pipe\.jsonl: a pipe or a device"):
            list_files([str(name)])


def test_an_input_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt is in .* and again in .*: its documents would count twice"):
        list_files([str(tmp_path / "a.txt"), str(tmp_path / "a.txt")])
    with pytest.raises(DataError, match="would count twice"):
        list_files([str(tmp_path / "link.txt"), str(tmp_path)])
    assert len(list_files([str(tmp_path)])) == 2


def test_a_key_that_is_there_twice_is_no_text(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two", "text": "three"}\n{"text": "x", "meta": {"a": 1, "a": 2}}\n')
    log = BadDocumentLog(2)
    assert list(read_documents([str(source)], bad_documents=log)) == ["one"]
    assert [example.partition("a.jsonl, ")[2] for example in log.examples] == [
        "line 2: not valid JSON (the key 'text' is given twice); every line must be one JSON object",
        "line 3: not valid JSON (the key 'a' is given twice); every line must be one JSON object",
    ]


def test_less_than_no_bad_documents() -> None:
    with pytest.raises(DataError, match=r"--max-bad -1 is impossible: give 0 or more\."):
        BadDocumentLog(-1)
