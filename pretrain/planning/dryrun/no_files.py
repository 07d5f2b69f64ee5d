"""Tables in files, in a dry run: room without files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pretrain.engine.tables.table_files import FileRecords, TableFiles


class NoFiles(TableFiles):
    """See `TableFiles`."""

    def __init__(self) -> None:
        super().__init__(Path())

    def records(self, num_rows: int, width: int, dtype: torch.dtype, num_state: int) -> FileRecords:
        """See `TableFiles.records`."""
        state = tuple(torch.zeros(num_state, num_rows))
        return FileRecords(torch.zeros(num_rows, width, dtype=dtype), state, np.empty(0, dtype=np.uint8))
