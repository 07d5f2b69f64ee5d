"""A file of `torch.save` that holds a dictionary of tensors, as a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pretrain.checkpoint.store.lazy_tensor import LazyTensor
from pretrain.checkpoint.store.tensors import Region, TensorInfo
from pretrain.checkpoint.store.torch_zip import open_zip
from pretrain.checkpoint.store.torch_zip_writer import TensorPlaceholder, write_zip
from pretrain.errors import CheckpointError
from pretrain.printable import printable


class StateDictReader:
    """An opened file; see `TensorReader`. Anything in it besides tensors is ignored."""

    def __init__(self, path: Path) -> None:
        """Open it without reading its tensors. They may be under a key `model`.

        Raises:
            CheckpointError: the file is missing or damaged, or holds no tensors by name.
        """
        self._path = path
        tree = open_zip(path)
        tree = tree.get("model", tree) if isinstance(tree, dict) else tree
        held = tree.items() if isinstance(tree, dict) else ()
        self._held = {name: tensor for name, tensor in held if isinstance(tensor, LazyTensor) and isinstance(name, str)}
        if bad := next((name for name in self._held if not name.isprintable()), None):
            raise CheckpointError(f"{path} is damaged: it names a tensor {printable(bad, 80)}")
        if not self._held:
            raise CheckpointError(f"{path} holds no tensors by name")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorReader`."""
        return {name: tensor.info for name, tensor in self._held.items()}

    def read(self, region: Region) -> Tensor:
        """See `TensorReader`."""
        if region.name not in self._held:
            raise CheckpointError(f"{self._path} has no tensor {region.name}")
        return self._held[region.name].read(region.offset, region.shape)


@dataclass(frozen=True)
class StateDictFile:
    """Such a file to be written, see `OutputFile`.

    Attributes:
        name: name of the file.
        tensors: shapes and dtypes of its tensors, by name.
    """

    name: str
    tensors: Mapping[str, TensorInfo]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def write(self, path: Path, read: Callable[[Region], Tensor], max_piece_bytes: int) -> None:
        """See `OutputFile`."""
        tree = OrderedDict((name, TensorPlaceholder(name, info)) for name, info in self.tensors.items())
        # Counted in the widest elements.
        write_zip(path, tree, read, max_elements=max(1, max_piece_bytes // 8))
