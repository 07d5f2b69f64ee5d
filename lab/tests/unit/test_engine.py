"""Names and methods that this code takes from Megatron-core, held to the record of the version that is installed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

from lab.maintenance.engine import MISSING, differences, read_record, recorded_versions, reliances, replaced
from parallel.machine.cpu import MEGATRON_VERSIONS


def test_the_engine_is_what_was_recorded() -> None:
    """Another version fails with a sentence per name that it has moved."""
    installed = version("megatron-core")
    record = read_record(installed if installed in recorded_versions() else recorded_versions()[-1])
    assert not list(differences(record, reliances()))


def test_every_version_that_we_run_on_has_a_record_without_gaps() -> None:
    assert recorded_versions() == sorted(MEGATRON_VERSIONS)
    records = [read_record(name) for name in recorded_versions()]
    assert {"megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors", *replaced()} <= set(
        records[0]
    )
    for record in records:
        assert record.keys() == records[0].keys()
        assert MISSING not in record.values()


def test_every_version_that_we_run_on_can_be_installed() -> None:
    """`make ENGINE=...` takes one of them, the lock file the first, and the package no other."""
    folder = Path(__file__).parents[3]
    pins = [
        re.findall(r"^megatron-core==(.+)$", path.read_text(), re.M)
        for path in folder.glob("requirements/engine-*.txt")
    ]
    assert sorted(pins) == sorted([name] for name in MEGATRON_VERSIONS)
    assert f"\nmegatron-core=={MEGATRON_VERSIONS[0]}\n" in (folder / "requirements" / "lock.txt").read_text()
    requirements = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    (accepted,) = (each.specifier for each in map(Requirement, requirements) if each.name == "megatron-core")
    neighbours = ("0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.1", "0.19.3", "0.20.0")
    assert [*accepted.filter([*MEGATRON_VERSIONS, *neighbours])] == [*MEGATRON_VERSIONS]


def test_what_moved_is_told_by_name() -> None:
    before = {
        "a:f": "(x, y)",
        "a:g": "(x)",
        "a:h": "(x)",
        "a:C.m": "(self) 0123456789ab",
        "a:C.n": "(self) 0123456789ab",
    }
    now = {
        "a:f": "(x, z)",
        "a:g": MISSING,
        "a:C.m": "(self) 0123456789ac",
        "a:C.n": "(self) 0123456789ab",
        "a:i": "(x)",
    }
    assert list(differences(before, now)) == [
        "a:C.m has other code: read what we replace",
        "a:f lost y and gained z",
        "a:g is gone: it was (x)",
        "a:h is relied on no more: record that",
        "a:i is not in the record: record it",
    ]
    # What is as long as a hash is none.
    assert list(differences({"a:f": "(x, elevenchars)"}, {"a:f": "(x)"})) == ["a:f lost elevenchars"]
