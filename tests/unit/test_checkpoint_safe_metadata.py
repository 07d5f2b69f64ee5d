"""A checkpoint's index is read only if it refers to an index's classes."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from pretrain.checkpoint.index import read_index
from pretrain.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as PyTorch writes it."""
    state = {name: torch.zeros(3, 2, dtype=dtype) for name, dtype in (("a", torch.float32), ("b", torch.bfloat16))}
    torch_checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_an_index_is_accepted(saved: Path) -> None:
    read_index(saved)


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"state_dict_metadata": [p]}], ids=["bare", "nested"])
def test_code_is_refused_and_not_run(saved: Path, tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    proof = tmp_path / "proof"
    (saved / ".metadata").write_bytes(pickle.dumps(wrap(Payload(os.system, f"touch {proof}"))))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        read_index(saved)
    assert not proof.exists()


@pytest.mark.parametrize(
    "function", [eval, exec, getattr, torch.load, torch.hub.load, os.unlink, pickle.loads], ids=lambda f: f.__name__
)
def test_no_function_of_python_or_torch_gets_through(saved: Path, function: Callable[..., Any]) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Payload(function, "x")))
    with pytest.raises(CheckpointError, match="it wants"):
        read_index(saved)


def names_that_are_no_dtype() -> list[str]:
    return sorted(name for name in dir(torch) if not isinstance(getattr(torch, name), torch.dtype) and name != "Size")


def wants(module: str, name: str) -> bytes:
    """A pickle that is nothing but a reference, by the opcode that takes any name; most pickled functions say where
    they are defined instead.
    """
    return f"c{module}\n{name}\n.".encode()


def test_of_torch_itself_only_sizes_and_dtypes_get_through(saved: Path) -> None:
    names = [*names_that_are_no_dtype(), "hub.load", "float32.__class__", "no_such_name"]
    assert {"load", "save", "hub", "compile", "ops", "jit", "Tensor", "set_default_dtype", "from_file"} <= set(names)
    for name in names:
        (saved / ".metadata").write_bytes(wants("torch", name))
        with pytest.raises(CheckpointError, match=re.escape(f"it wants torch.{name}, which")):
            read_index(saved)
    for name in ("Size", "float32", "bfloat16", "int64", "bool"):
        (saved / ".metadata").write_bytes(wants("torch", name))
        with pytest.raises(CheckpointError, match="it holds a"):
            read_index(saved)


@pytest.mark.parametrize("module", ["numpy", "torch.hub", "evil"])
def test_a_dtype_of_another_module_is_refused_before_the_module_is_imported(
    saved: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "evil.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(saved)
    (saved / ".metadata").write_bytes(wants(module, "float32"))
    with pytest.raises(CheckpointError, match=rf"it wants {module}\.float32"):
        read_index(saved)


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"\x80\x04", pickle.dumps([]), pickle.dumps({"a": 1}), b"\x8e" + b"\xff" * 8],
    ids=["empty", "junk", "cut", "list", "dict", "a length past any memory"],
)
def test_damage_is_an_error(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_index(saved)


def test_truncation_anywhere_is_an_error(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    for size in range(0, len(content), 7):
        (saved / ".metadata").write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_index(saved)


def test_no_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_index(tmp_path)
