"""Reference of `list_topk`, which defines the order of retrieval; the oracle of every other implementation.

Legend: N entries of a list, K kept.
"""

from __future__ import annotations

from torch import Tensor


def list_topk(scores: Tensor, top_k: int) -> Tensor:
    """Positions of the K best entries of each list, best first.

    The larger score comes first; of equal scores (0 and -0 are equal) the one with the smaller position. NaN is larger
    than everything and equal to NaN: an entry that is not a number is retrieved, so that it is seen in the loss, and
    every position is one of the list.

    Args:
        scores: [..., N], floating point.
        top_k: K <= N.

    Returns:
        [..., K], int64.

    Raises:
        ValueError: K is not in [1, N].
    """
    check_top_k(top_k, scores.shape[-1])
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def check_top_k(top_k: int, num_entries: int) -> None:
    """Raises ValueError where K is not in [1, N]."""
    if not 1 <= top_k <= num_entries:
        raise ValueError(f"top_k is {top_k}, but the list has {num_entries} entries: keep at least 1 and at most all")
