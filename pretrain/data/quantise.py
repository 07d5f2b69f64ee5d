"""Codes of images by a plain vector quantiser: patches, and the nearest of their k-means.

Legend: N images, H x W pixels of C channels, p side of a patch, L = H W / p^2 patches of an image, d = p^2 C numbers of a
patch, K codes.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.machine.atomic_write import atomic_write
from parallel.machine.refusals import check_can_write
from pretrain.errors import DataError

_MOST_ROUNDS = 100
_DISTANCES_AT_A_TIME = 1 << 24

Floats = NDArray[np.float64]


def quantise_file(images: Path, output: Path, *, patch: int, num_codes: int) -> NDArray[np.int64]:
    """Codes [N, L] of the images of an .npz file, written to another one with their classes [N] and the means [K, d].

    Raises:
        DataError: arrays that are no images, a patch that does not divide them, or fewer kinds of patches than codes.
        OSError: the output cannot be written, which is seen before the codes are looked for.
    """
    pixels, classes = _read(images)
    check_can_write(output)
    parts = patches(pixels, patch)
    means = k_means(parts.reshape(-1, parts.shape[2]), num_codes)
    codes = nearest(parts.reshape(-1, parts.shape[2]), means).reshape(parts.shape[:2])
    with atomic_write(output) as stream:
        np.savez(stream, codes=codes, classes=classes, means=means)
    return codes


def patches(pixels: Floats, patch: int) -> Floats:
    """[N, L, d], row by row, of images [N, H, W, C].

    Raises:
        DataError: the patch does not divide the images.
    """
    num_images, height, width, channels = pixels.shape
    if patch < 1 or height % patch or width % patch:
        raise DataError(f"--patch {patch} does not divide images of {height} x {width} pixels: give a divisor of both.")
    cut = pixels.reshape(num_images, height // patch, patch, width // patch, patch, channels)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(num_images, -1, patch * patch * channels)


def k_means(vectors: Floats, num_means: int) -> Floats:
    """Means [K, d] of clusters of vectors [n, d], by Lloyd's rounds until nothing moves, at most 100 of them.

    Nothing is drawn: the first means are evenly spaced among the sorted distinct vectors, and a cluster without a vector
    starts again at the one that is farthest from its mean.

    Raises:
        DataError: the distinct vectors are fewer than the means.
    """
    distinct = np.unique(vectors, axis=0)
    if not 1 <= num_means <= len(distinct):
        raise DataError(
            f"--codes {num_means}: the images have {len(distinct)} kinds of patches, give 1 to so many codes."
        )
    means = distinct[np.linspace(0, len(distinct) - 1, num_means).round().astype(int)]
    of = nearest(vectors, means)
    for _ in range(_MOST_ROUNDS):
        counts = np.bincount(of, minlength=num_means)
        sums = np.zeros_like(means)
        np.add.at(sums, of, vectors)
        far = np.argsort(-((vectors - means[of]) ** 2).sum(1), kind="stable")
        means = sums / np.maximum(counts, 1)[:, None]
        empty = np.flatnonzero(counts == 0)
        means[empty] = vectors[far[: len(empty)]]
        moved = nearest(vectors, means)
        if np.array_equal(moved, of):
            break
        of = moved
    return means


def nearest(vectors: Floats, means: Floats) -> NDArray[np.int64]:
    """[n], the number of the mean that is nearest to each vector; of equally near ones the first."""
    rows = max(1, _DISTANCES_AT_A_TIME // means.size)
    found = [
        ((vectors[start : start + rows, None] - means) ** 2).sum(2).argmin(1) for start in range(0, len(vectors), rows)
    ]
    return np.concatenate(found)


def _read(path: Path) -> tuple[Floats, NDArray[Any]]:
    """Pixels [N, H, W, C] and classes [N]."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            pixels, classes = arrays["images"], arrays["classes"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Give an .npz file with arrays 'images' and 'classes'."
        ) from error
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or classes.shape != pixels.shape[:1] or not len(pixels):
        raise DataError(
            f"{path}: images is {list(pixels.shape)} and classes {list(classes.shape)}: give [N, H, W] or [N, H, W, C], and "
            "[N], of at least one image."
        )
    return pixels.astype(np.float64), classes
