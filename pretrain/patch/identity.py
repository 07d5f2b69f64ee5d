"""Identity of the model that a patch is of: hashes of all weights that are no memory tables.

Values are hashed as bf16: an fp32 run, a bf16 run and the exports of both agree on them. Left out are the buffers that an
export computes again, and the rows that pad the vocabulary, which an export drops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pretrain.checkpoint.store.lazy_tensor import memory_of
from pretrain.checkpoint.store.tensors import Region, pieces
from pretrain.convert.compare import Counter
from pretrain.convert.format import BUFFERS, OpenedCheckpoint
from pretrain.convert.names import HUGGINGFACE
from pretrain.convert.resources import OnStart, Resources

_TABLES = "banks."
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Predicts further tokens in training; exports leave it out.
_OF_TRAINING_ALONE = "multi_token."
_DIGITS = 32


def tables_of(opened: OpenedCheckpoint) -> dict[str, tuple[int, int]]:
    """Shapes of a checkpoint's memory tables, by name."""
    found = {}
    for name in opened.weights:
        if name.startswith(_TABLES):
            rows, columns = opened.reader.tensors[name].shape
            found[name] = (rows, columns)
    return found


def other_weights(opened: OpenedCheckpoint) -> dict[str, Region]:
    """Weights of a checkpoint that are no tables, as far as they are hashed, by name.

    Raises:
        CheckpointError: nothing says how many token ids there are.
    """
    found = {}
    for name in opened.weights:
        if name.startswith(_TABLES) or name.endswith(BUFFERS):
            continue
        shape = opened.reader.tensors[name].shape
        if name in _VOCABULARY:
            shape = (min(shape[0], opened.vocab_size), *shape[1:])
        found[name] = Region(name, (0,) * len(shape), shape)
    return found


class WeightHash:
    """Hash of one weight, of which pieces come in row-major order."""

    def __init__(self, region: Region) -> None:
        self._digest = hashlib.sha256(str(region.shape).encode())

    def update(self, piece: Tensor) -> None:
        """Add the next elements."""
        values = piece.to(torch.bfloat16 if piece.is_floating_point() else torch.int64)
        self._digest.update(memory_of(values.contiguous()))

    def text(self) -> str:
        """Hexadecimal digits of the hash."""
        return self._digest.hexdigest()[:_DIGITS]


def difference_of_model(
    identity: Mapping[str, str], opened: OpenedCheckpoint, resources: Resources, on_start: OnStart
) -> str | None:
    """Difference between a checkpoint's model and the one that a patch was made on, in words; None if there is none.

    Args:
        identity: hashes of the patch.
        on_start: told of a phase's name and bytes when it begins; returns what is told of its progress.
    """
    regions = other_weights(opened)
    missing = [name for name in identity if name not in regions]
    if opened.format_name == HUGGINGFACE:
        missing = [name for name in missing if not name.startswith(_OF_TRAINING_ALONE)]
    if missing:
        return f"{missing[0]} is not in {opened.path}"
    added = [name for name in regions if name not in identity]
    if added:
        return f"{added[0]} is in {opened.path}, and not in that model"
    tensors = opened.reader.tensors
    tell = Counter(on_start("model", sum(tensors[name].dtype.itemsize * each.numel for name, each in regions.items())))

    def is_other(region: Region) -> bool:
        found, size = WeightHash(region), tensors[region.name].dtype.itemsize
        for piece in pieces(region, max(1, resources.piece_bytes // size)):
            found.update(opened.reader.read(piece))
            tell(piece.numel * size)
        return found.text() != identity[region.name]

    with ThreadPoolExecutor(resources.num_workers) as pool:
        others = [name for name, other in zip(regions, pool.map(is_other, regions.values()), strict=True) if other]
    if not others:
        return None
    more = f", and so have {len(others) - 1:,} more weights" if len(others) > 1 else ""
    return f"{others[0]} has other values in {opened.path}{more}"
