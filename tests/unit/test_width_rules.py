"""Factors of Muon's updates and of rates, as the page's tables have them."""

from __future__ import annotations

import math

import pytest

from megamem.config.width import Width, WidthRules

RULES = WidthRules(ratio=4.0, head_factor=0.5)


def original(shape: tuple[float, float]) -> float:
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def match_rms(shape: tuple[float, float]) -> float:
    return 0.2 * math.sqrt(max(shape))


# Width, shape at four times the base, and the factors with the original scale and with AdamW's size.
MATRICES = [
    (Width.BOTH, (512, 512), 1.0, 1 / 2),
    # A feed-forward's, whose outputs are more than its inputs at both widths.
    (Width.BOTH, (1024, 512), 1.0, 1 / 2),
    (Width.INPUTS, (32, 512), 1 / 2, 1 / 4),
    (Width.OUTPUTS, (512, 32), 1.0, 1.0),
    # The side that grows is the shorter one at the base alone: its s falls from sqrt(2) to 1, or grows by sqrt(2).
    (Width.INPUTS, (256, 512), 1 / math.sqrt(2), 1 / math.sqrt(8)),
    (Width.NEITHER, (64, 32), 1.0, 1.0),
]


@pytest.mark.parametrize(("width", "shape", "by_original", "by_match"), MATRICES)
def test_updates_of_matrices(width: Width, shape: tuple[int, int], by_original: float, by_match: float) -> None:
    base = RULES.base_shape(width, shape)
    for scale, expected in ((original, by_original), (match_rms, by_match)):
        factor = RULES.spectral_factor(width, shape, scale(shape), scale(base))
        assert factor == pytest.approx(expected)
        # Whatever the scale: sizes of updates go with sqrt(outputs / inputs) from width to width.
        ratio = factor * scale(shape) / scale(base)
        assert ratio == pytest.approx(math.sqrt(shape[0] / shape[1]) / math.sqrt(base[0] / base[1]))


def test_rates_and_gains() -> None:
    rates = {width: RULES.rate_factor(width) for width in Width}
    assert rates == {
        Width.NEITHER: 1.0,
        Width.OUTPUTS: 1.0,
        Width.INPUTS: 1 / 4,
        Width.BOTH: 1 / 4,
        Width.LOGITS: 1 / 4,
        Width.SCORES: 1 / 2,
        Width.HEADS: 1 / 2,
    }
    assert [RULES.gain(width) for width in (Width.LOGITS, Width.SCORES, Width.HEADS)] == [1 / 4, 1 / 2, 1 / 2]
    assert RULES.rate_factors == (1.0, 1 / 4, 1 / 2)
    assert WidthRules().rate_factors == (1.0,)
