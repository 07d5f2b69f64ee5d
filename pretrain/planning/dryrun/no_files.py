"""Tables in files, in a dry run: room without files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pretrain.engine.table_files import TableFiles


class NoFiles(TableFiles):
    """See `TableFiles`."""

    def __init__(self) -> None:
        super().__init__(Path())

    def zeros(self, num: int, dtype: torch.dtype) -> Tensor:
        """See `TableFiles.zeros`."""
        return torch.zeros(num, dtype=dtype)
