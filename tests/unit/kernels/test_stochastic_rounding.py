"""Stochastic rounding: a number's neighbours in bf16, by the chance that its mean wants, from an element's place alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.rounding import Rounding, round_stochastically


def rounded(values: Tensor, *, key: int = 1, first_row: int = 0, first_column: int = 0) -> Tensor:
    out = torch.full(values.shape, torch.nan, dtype=torch.bfloat16)
    round_stochastically(values, out, Rounding(key, first_row, first_column), torch.arange(values.shape[0]))
    return out


def some(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-9, 9, columns)


def test_a_number_becomes_one_of_its_two_neighbours() -> None:
    values = some(200, 50)
    found = rounded(values).double()
    # bf16 keeps 8 significant bits: neighbours are 2^(exponent - 7) apart, with magnitudes in [2^exponent, 2^(exponent + 1)).
    unit = torch.ldexp(torch.ones_like(found), torch.frexp(values.double())[1] - 8)
    below, above = (values.double() / unit).floor() * unit, (values.double() / unit).ceil() * unit
    assert ((found == below) | (found == above)).all()
    assert 0.4 < float((found == above).double().mean()) < 0.6


def test_what_bf16_can_hold_stays() -> None:
    values = torch.cat([some(50, 40).bfloat16().float(), torch.tensor([[0.0, -0.0, torch.inf, -torch.inf] * 10])])
    assert torch.equal(rounded(values).view(torch.int16), values.bfloat16().view(torch.int16))


def test_what_is_no_number_stays_none() -> None:
    """All bits set is the NaN that a GPU makes: one more would be -0."""
    values = torch.tensor([[0x7FFFFFFF, -1, 0x7FC00000]] * 20, dtype=torch.int32).view(torch.float32)
    assert rounded(values).isnan().all()


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_number(share: float, sign: int) -> None:
    """Among n roundings with the probability p of going up, n p +- 5 sqrt(n p (1 - p)) go up."""
    num = 40_000
    values = torch.full((num // 8, 8), sign * (1 + share / 128))
    up = int((rounded(values).float() * sign > 1).sum())
    assert abs(up - num * share) < 5 * (num * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("rectangle", [(0, 0, 7, 13), (3, 5, 4, 8), (6, 1, 1, 11), (2, 12, 5, 1), (0, 4, 7, 4)])
def test_an_element_is_rounded_by_its_place_in_the_whole_table(rectangle: tuple[int, int, int, int]) -> None:
    row, column, rows, columns = rectangle
    values = some(7, 13)
    part = values[row : row + rows, column : column + columns].contiguous()
    expected = rounded(values)[row : row + rows, column : column + columns]
    assert torch.equal(rounded(part, first_row=row, first_column=column), expected)


def test_keys_and_places_beyond_32_bits_give_other_numbers() -> None:
    values = torch.full((64, 64), 1 + 1 / 256)
    different: list[dict[str, Any]] = [{}, {"key": 2}, {"first_row": 64}, {"first_row": 1 << 33}]
    found = [rounded(values, **options) for options in different]
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            assert 0.4 < float((one == other).double().mean()) < 0.6
    # Neither rows nor columns repeat each other.
    ups = (found[0].float() > 1).double() - 0.5
    for step in (1, 2, 3, 4):
        assert abs(float((ups[:, step:] * ups[:, :-step]).mean())) < 5 * 0.25 / 60
        assert abs(float((ups[step:] * ups[:-step]).mean())) < 5 * 0.25 / 60
