"""Reading documents, and what every kind of broken input says."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.sources import BadDocumentLog, list_files, read_documents, read_records
from pretrain.errors import DataError


def texts(*inputs: Path | str, **options) -> list[str]:
    return list(read_documents([str(path) for path in inputs], **options))


def write_json_lines(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, columns: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


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
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1
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
    write_parquet(folder / "a.parquet", {"text": documents})
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert texts(folder / name) == documents, name


def test_byte_order_mark_blank_lines_and_missing_final_newline_are_fine(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert texts(path) == ["one", "two"]


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
    b'["text"]': "a JSON list where an object",
    b'{"content": "a"}': "the field 'text' is missing (present: content)",
    b'{"text": 3}': "holds int, not a string",
    b'{"text": null}': "holds NoneType, not a string",
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


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_truncated_archive_is_an_error_and_not_a_short_corpus(tmp_path: Path, suffix: str, kept: int):
    content = "".join(json.dumps({"text": f"document {i} {hash(i * 7919)}"}) + "\n" for i in range(1000)).encode()
    compressed = gzip.compress(content) if suffix == "gz" else zstandard.compress(content)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(compressed[:kept])
    with pytest.raises(DataError, match=r"a\.jsonl.*the file cannot be read on"):
        texts(path)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
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


def test_parquet_null_is_a_bad_row(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x", None, "y"]})
    with pytest.raises(DataError, match=r"a\.parquet, row 2: the column 'text' is null here"):
        texts(path)


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
