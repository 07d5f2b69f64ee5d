"""Input files: their list, their order, and the format that each is read as."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from pretrain.config.suggest import did_you_mean_path
from pretrain.data.contents import COMPRESSIONS, ending_of
from pretrain.data.installed import INSTALLED
from pretrain.errors import DataError
from pretrain.printable import printable

Kind = Literal["text", "raw", "json", "csv", "parquet", "arrow", "codes", "refused"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".npz": "codes",
}
_TABLES = ("parquet", "arrow", "codes")
_AS_IT_IS = "extract its text first, or pass --text to take it as it is"
_EXTRACT = "extract its text first"
_UNPACK = "an archive of files: unpack it, and name the folder"
_REFUSED = {
    **dict.fromkeys((".html", ".htm", ".xhtml", ".mhtml"), f"HTML, and not text: {_AS_IT_IS}"),
    ".xml": f"XML, and not text: {_AS_IT_IS}",
    ".rtf": f"RTF, and not text: {_AS_IT_IS}",
    ".pdf": f"a PDF: {_EXTRACT}",
    **dict.fromkeys((".doc", ".docx", ".odt", ".ppt", ".pptx", ".epub", ".mobi"), f"no plain text: {_EXTRACT}"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "a spreadsheet: save it as CSV"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".txz", ".tbz2", ".7z", ".rar"), _UNPACK),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".npy", ".bin"), "binary data, and not text"),
    **dict.fromkeys(
        (".db", ".sqlite", ".sqlite3", ".h5", ".hdf5", ".tfrecord"), "binary data: export it as JSON lines"
    ),
}
_ARCHIVE_IN_ARCHIVE = "compressed, and no text or lines inside: unpack it"
_MAGIC = (
    (re.compile(rb"%PDF-"), f"a PDF: {_EXTRACT}"),
    (re.compile(rb"\{\\rtf"), f"RTF, and not text: {_AS_IT_IS}"),
    (re.compile(rb"PK\x03\x04"), "a zip archive, or a document that is one inside: unpack it, or extract its text"),
    (re.compile(rb"\x1f\x8b"), "compressed with gzip: give its name the ending .gz"),
    (re.compile(rb"\xfd7zXZ\0"), "compressed with xz: give its name the ending .xz"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "compressed with zstd: give its name the ending .zst"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "compressed with bzip2: give its name the ending .bz2"),
    (re.compile(rb"PAR1"), "a parquet file: give its name the ending .parquet"),
    (re.compile(rb"ARROW1\0\0"), "an Arrow file: give its name the ending .arrow"),
    (re.compile(rb"(?s).{257}ustar"), _UNPACK),
    (re.compile(rb"\xff\xfe|\xfe\xff"), "UTF-16, and UTF-8 is read: iconv -f UTF-16 -t UTF-8 converts it"),
)
_HTML = re.compile(rb"\s*(<!doctype html|<html)", re.IGNORECASE)
_INSTALLED_NAMES = " or ".join(INSTALLED)


@dataclass(frozen=True)
class SourceFile:
    """One input file. Size and modification time are those seen when the inputs were listed."""

    path: Path
    input_index: int
    kind: Kind
    size_bytes: int
    mtime_ns: int

    @property
    def refusal(self) -> str | None:
        """Format of a file that no text is read from, by its name, and the remedy; None: it is read."""
        return _kind_and_refusal(self.path)[1] if self.kind == "refused" else None

    @property
    def read_as(self) -> tuple[str, ...]:
        """Kind of the file, for the request's fingerprint; empty for files that were always read in this way.

        Others were once read as text: their kind keeps such a request from matching this one.
        """
        was_so_always = self.kind == "text" or ending_of(self.path) in (".jsonl", ".json", ".parquet", ".npz")
        return () if was_so_always and self.kind != "raw" else (self.kind,)


def list_files(inputs: Sequence[str], *, as_text: bool = False) -> list[SourceFile]:
    """The files behind the inputs: each input in turn, a directory's files sorted by path.

    Names that start with a dot are left out inside directories, and links to directories are not followed. A folder
    that `datasets` has saved stands for the Arrow files of its data.

    Args:
        as_text: every file is text, whatever its name says.

    Raises:
        DataError: an input does not exist, or is a directory without files, or one of several splits.
    """
    if not inputs:
        raise DataError(f"No input was given. Name files or directories, or {_INSTALLED_NAMES}.")
    files: list[SourceFile] = []
    for index, name in enumerate(inputs):
        paths = INSTALLED[name]() if name in INSTALLED else _paths_of(name, as_text=as_text)
        files.extend(_source_file(path, index, as_text=as_text) for path in paths)
    _refuse_doubles(files, inputs)
    return files


def binary_kind(path: Path, content: bytes) -> str | None:
    """Format of a file that should be text, by its first bytes, and the remedy; None: it may well be text."""
    for magic, what in _MAGIC:
        if magic.match(content):
            return what
    # Templates of programs begin like a page too, and are text: those have endings of their own.
    if path.suffix.lower() in ("", ".txt") and _HTML.match(content):
        return f"HTML, and not text: {_AS_IT_IS}"
    return None


def _kind_and_refusal(path: Path) -> tuple[Kind, str]:
    """Kind of a file by its name, and the reason if it is refused (else empty)."""
    ending = ending_of(path)
    if ending in _REFUSED:
        return "refused", _REFUSED[ending]
    kind = _KINDS.get(ending, "text")
    if kind in _TABLES and path.suffix.lower() in COMPRESSIONS:
        return "refused", _ARCHIVE_IN_ARCHIVE
    return kind, ""


def _source_file(path: Path, input_index: int, *, as_text: bool) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(
            f"{printable(path)}: cannot be read ({error.strerror}). Remove it from the inputs or mend it."
        ) from error
    if not S_ISREG(stat.st_mode):
        raise DataError(
            f"{printable(path)}: a pipe or a device, which has neither a size nor a second reading: write it to a file first."
        )
    kind = "raw" if as_text else _kind_and_refusal(path)[0]
    return SourceFile(path, input_index, kind, stat.st_size, stat.st_mtime_ns)


def _refuse_doubles(files: Sequence[SourceFile], inputs: Sequence[str]) -> None:
    """Links inside one directory may be meant; the same file behind two inputs is a slip."""
    seen: dict[Path, int] = {}
    for file in files:
        first = seen.setdefault(file.path.resolve(), file.input_index)
        if first != file.input_index:
            names = " and again in ".join(inputs[index] for index in (first, file.input_index))
            raise DataError(f"{printable(file.path)} is in {names}: its documents would count twice. Leave one out.")


def _paths_of(name: str, *, as_text: bool) -> list[Path]:
    root = Path(name)
    if root.exists() and not root.is_dir():
        return [root]
    if not root.is_dir():
        raise DataError(
            f"{name}: no such file or directory{did_you_mean_path(root)} "
            f"Give an existing path, or {_INSTALLED_NAMES} for sources of this machine."
        )
    paths: list[Path] = []
    for folder, subfolders, file_names in os.walk(root):
        subfolders[:] = [subfolder for subfolder in subfolders if not subfolder.startswith(".")]
        file_names = [file_name for file_name in file_names if not file_name.startswith(".")]
        if not as_text:
            file_names = _without_descriptions(Path(folder), file_names)
        paths.extend(Path(folder, file_name) for file_name in file_names)
    if not paths:
        raise DataError(
            f"{name}: the directory holds no files. Give one with text, JSON lines, CSV, parquet or Arrow files."
        )
    return sorted(paths)


def _without_descriptions(folder: Path, names: list[str]) -> list[str]:
    """Data files of a folder that `datasets` wrote, without its descriptions and the cached results of computations.

    The names of any other folder are returned as they are.
    """
    if "dataset_dict.json" in names:
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        if len(splits) > 1:
            meant = "train" if "train" in splits else splits[0]
            other = next(split for split in splits if split != meant)
            raise DataError(
                f"{folder} holds the splits {', '.join(splits)}: reading all of them would train on test data. Name "
                f"those that you mean, as in {folder / meant} --validation {folder / other}."
            )
        names = [name for name in names if name != "dataset_dict.json"]
    if "dataset_info.json" not in names:
        return names
    if "state.json" in names:
        return _files_of_state(folder)
    found = [name for name in names if name.endswith(".arrow") and not name.startswith("cache-")]
    return found or names


def _files_of_state(folder: Path) -> list[str]:
    """Files of a saved data set, as `datasets` has listed them in `state.json`."""
    state = folder / "state.json"
    try:
        names = [str(file["filename"]) for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{state}: the list of the data set's files cannot be read ({error}). Save it again."
        ) from error
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"{folder}: {name} is missing, which {state.name} lists. Copy or save the data set again.")
    return names
