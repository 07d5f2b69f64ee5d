"""Index arrays on disk: mapped into memory, complete or absent, and made by the first process that misses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.errors import DataError

Array = NDArray[Any]


def open_index(
    folder: Path, key: str, names: Sequence[str], make: Callable[[list[Path]], None], of: str
) -> list[Array]:
    """The arrays `key-name.npy` of a folder, mapped into memory.

    Args:
        key: stands for all that the arrays depend on.
        names: of the arrays.
        make: writes them, each whole or not at all, if one is missing.
        of: their subject, in words.

    Raises:
        DataError: they cannot be written or read.
    """
    paths = [folder / f"{key}-{name}.npy" for name in names]
    try:
        if not all(path.is_file() for path in paths):
            make(paths)
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: the index of {of} cannot be kept there ({error}). "
            "Free space, or remove the folder if it is damaged: it is rebuilt."
        ) from error
