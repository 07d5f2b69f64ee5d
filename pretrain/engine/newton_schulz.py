"""Newton-Schulz iterations that take the singular values of a matrix near 1, as Muon does (Jordan et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c: the quintic whose slope at 0 is steepest; repeated, it takes singular values to about 0.7 .. 1.2."""
_SMALLEST_NORM = 1e-7


def orthogonalised(matrix: Tensor, num_steps: int) -> Tensor:
    """[m, n], in the dtype of `matrix` [m, n]: its singular vectors, with singular values near 1.

    X = matrix / |matrix|_F, and `num_steps` times with A = X X^T

        X <- a X + (b A + c A A) X

    Products are of the shorter side: the matrix is transposed if it has more rows than columns.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
