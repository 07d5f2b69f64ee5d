"""The file that maps token ids to fewer, as `megamem data compress` writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_token_map(path: Path, num_ids: int, num_mapped: int) -> Tensor:
    """[num_ids] int64 ids below `num_mapped`.

    Raises:
        ValueError: the file cannot be read, or maps other ids.
    """
    try:
        mapped = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.memory.token_map is {path}, which cannot be read ({error}): name a file of `megamem data compress`"
        ) from error
    if mapped.shape != (num_ids,) or mapped.dtype.kind != "i":
        raise ValueError(
            f"model.memory.token_map is {path}, with {mapped.dtype} of shape {list(mapped.shape)}, but there are "
            f"{num_ids} token ids: make it of this model's tokenizer by `megamem data compress`"
        )
    if mapped.min() < 0 or mapped.max() >= num_mapped:
        raise ValueError(
            f"model.memory.compressed_vocab_size is {num_mapped}, but {path} has ids from {mapped.min()} to "
            f"{mapped.max()}: set it to what `megamem data compress` prints"
        )
    return torch.from_numpy(mapped.astype(np.int64))
