"""`lab.maintenance.walk`: the files that a key's value passes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from lab.maintenance.walk import Walk
from pretrain.config.stages import load_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("model: {memory: {kind: ultramem_v2, top_k: 61, num_keys: 83}}", encoding="utf-8")
    return path


def walked(config_file: Path, walk: Walk) -> list[tuple[str, list[str]]]:
    before = sys.getprofile()
    sys.setprofile(walk)
    try:
        load_config(config_file)
    finally:
        sys.setprofile(before)
    return walk.stays()


def test_a_walk_goes_from_the_text_to_the_class_that_declares_the_key(config_file: Path) -> None:
    stays = walked(config_file, Walk("top_k", 61))
    files = [file for file, _ in stays]
    assert [files[0], files[1]] == ["pretrain/config/source.py", "pretrain/config/loader.py"]
    functions = dict(stays)["megamem/retrieval/config.py"]
    assert "RetrievalConfig.row_top_k" in functions
    assert "RetrievalConfig.check" not in functions, "it names no top_k"
    assert all(first != second for first, second in itertools.pairwise(files)), "these are one stay"
    every = [function for _, of_stay in stays for function in of_stay]
    assert len(every) == len(set(every))


def test_methods_of_the_section_are_counted_where_asked_for(config_file: Path) -> None:
    functions = {
        function for _, of_stay in walked(config_file, Walk("top_k", 61, methods=True)) for function in of_stay
    }
    assert {"RetrievalConfig.check", "MemoryConfig.is_inserted"} <= functions


def test_another_value_passes_nothing_of_it(config_file: Path) -> None:
    assert walked(config_file, Walk("top_k", 62)) == []
