"""A checkpoint that does not fit the model is told of with what is to blame."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pretrain.checkpoint.loading import _remedy, _shortfall


def test_another_shape_is_blamed_on_keys_and_data_and_a_missing_tensor_on_the_version() -> None:
    index: Any = SimpleNamespace(tensors={"embedding": SimpleNamespace(shape=(384, 8))}, items={"embedding": []})
    for name, blamed in (("embedding", "vocabulary of the data's tokenizer"), ("other", "version of the package")):
        target: Any = SimpleNamespace(region=SimpleNamespace(name=name), global_shape=(512, 8))
        shortfall = _shortfall(target, index)
        assert shortfall is not None
        assert blamed in _remedy(shortfall)
