"""`megamem data package`: texts of source archives, which pip finds in a folder here."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from pretrain.data.archives import write_package_texts
from pretrain.errors import DataError

# A build that needs nothing, so that pip asks no index.
BUILD = """
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    made = pathlib.Path(folder, "manuals-1.0.dist-info")
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\\nName: manuals\\nVersion: 1.0\\n")
    (made / "WHEEL").write_text("Wheel-Version: 1.0\\nGenerator: a test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    return made.name
def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise NotImplementedError
"""
FILES = {
    "pyproject.toml": b'[project]\nname = "manuals"\nversion = "1.0"\n[build-system]\nrequires = []\nbuild-backend = "build_of_manuals"\nbackend-path = ["."]\n',
    "build_of_manuals.py": BUILD.encode(),
    "PKG-INFO": b"Metadata-Version: 2.1\nName: manuals\nVersion: 1.0\n",
    "docs/second.txt": "Zwölf Boxkämpfer.\n".encode(),
    "docs/deep/first.txt": b"Pack my box.\n",
    "docs/blank.txt": b" \n",
    "docs/picture.png": b"\x89PNG\xff",
    "other/third.txt": b"not asked for\n",
}


def write_archive(path: Path) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name, content in FILES.items():
                zipped.writestr(f"manuals-1.0/{name}", content)
        return
    with tarfile.open(path, "w:gz") as tar:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"manuals-1.0/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.fixture(params=[".tar.gz", ".zip"])
def found_by_pip(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    write_archive(folder / f"manuals-1.0{request.param}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


@pytest.mark.usefixtures("found_by_pip")
def test_files_that_match_are_documents_in_the_order_of_their_paths(tmp_path: Path) -> None:
    output = tmp_path / "made" / "texts.jsonl"
    fetched = write_package_texts("manuals==1.0", ["docs/*.txt"], output)
    assert [json.loads(line) for line in output.read_bytes().splitlines()] == [
        {"file": "docs/deep/first.txt", "text": "Pack my box.\n"},
        {"file": "docs/second.txt", "text": "Zwölf Boxkämpfer.\n"},
    ]
    assert (fetched.num_documents, fetched.num_bytes) == (2, 13 + 20)


@pytest.mark.usefixtures("found_by_pip")
@pytest.mark.parametrize("found_by_pip", [".zip"], indirect=True)
@pytest.mark.parametrize(
    ("package", "pattern", "message"),
    [
        ("manuals==1.0", "*.md", "no file of its source archive matches *.md: see --files"),
        ("manuals==1.0", "docs/*", "docs/picture.png is not UTF-8 text: name others with --files"),
        (
            "manuals==2.0",
            "*",
            "pip cannot download the source archive of manuals==2.0 (ERROR: No matching distribution",
        ),
        ("manuals", "*", "'manuals' does not name one version, so tomorrow's text would be another"),
        ("manuals==1.*", "*", "'manuals==1.*' does not name one version"),
        ("manuals>=1,==1.0", "*", "does not name one version"),
        ("-r secrets", "*", "'-r secrets' does not name one version"),
    ],
)
def test_what_is_refused_writes_nothing(package: str, pattern: str, message: str, tmp_path: Path) -> None:
    output = tmp_path / "texts.jsonl"
    with pytest.raises(DataError) as refused:
        write_package_texts(package, [pattern], output)
    assert message in str(refused.value)
    assert not output.exists()
