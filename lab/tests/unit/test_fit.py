"""Fits of losses recover the parameters of a synthetic law, and refuse what they cannot know."""

from __future__ import annotations

from itertools import product

import pytest

from lab.studies.fit.fits import fits, report
from lab.studies.fit.law import Law, fit, lacking
from lab.studies.fit.picture import picture
from lab.studies.fit.points import Point
from pretrain.errors import ConfigError


def law(floor: float, terms: list[tuple[float, float]], amounts: list[float]) -> float:
    return floor + sum(factor * amount**-exponent for (factor, exponent), amount in zip(terms, amounts, strict=True))


def test_three_sizes_give_the_law_of_compute() -> None:
    compute = [1e12, 4e12, 16e12]
    losses = [law(1.7, [(600.0, 0.21)], [c]) for c in compute]
    found = fit({"compute": compute}, losses)
    assert found.floor == pytest.approx(1.7, rel=1e-3)
    assert found.exponents["compute"] == pytest.approx(0.21, rel=1e-3)
    # The factor at the geometric mean, 4e12.
    assert found.factors["compute"] == pytest.approx(600.0 * 4e12**-0.21, rel=1e-3)
    assert found.residual < 1e-6
    assert found.predict({"compute": 64e12}) == pytest.approx(law(1.7, [(600.0, 0.21)], [64e12]), abs=1e-4)


def test_compute_rows_and_reads() -> None:
    grid = list(product([1e12, 4e12, 16e12], [1e3, 1e4, 1e5], [8.0, 16.0, 64.0]))
    terms = [(600.0, 0.21), (2.0, 0.4), (0.5, 0.9)]
    losses = [law(1.7, terms, list(at)) for at in grid]
    amounts = {name: [at[i] for at in grid] for i, name in enumerate(("compute", "rows", "reads"))}
    found = fit(amounts, losses)
    for (_, exponent), name in zip(terms, amounts, strict=True):
        assert found.exponents[name] == pytest.approx(exponent, rel=0.02)
    assert (found.useless, found.unsettled) == ([], [])
    unseen = {"compute": 64e12, "rows": 1e6, "reads": 128.0}
    assert found.predict(unseen) == pytest.approx(law(1.7, terms, list(unseen.values())), abs=2e-3)


def test_noise_moves_predictions_by_no_more_than_its_like() -> None:
    compute = [1e12 * 4**n for n in range(5)]
    noise = [2e-3, -2e-3, 2e-3, -2e-3, 2e-3]
    losses = [law(1.7, [(600.0, 0.21)], [c]) + error for c, error in zip(compute, noise, strict=True)]
    found = fit({"compute": compute}, losses)
    assert 0 < found.residual < 2e-3
    assert found.predict({"compute": 4**5 * 1e12}) == pytest.approx(law(1.7, [(600.0, 0.21)], [4**5 * 1e12]), abs=0.03)


def test_terms_are_not_negative() -> None:
    """Losses that rise with compute: a constant misses them least."""
    found = fit({"compute": [1.0, 2.0, 4.0]}, [3.0, 3.1, 3.2])
    assert found.factors["compute"] == 0.0
    assert found.floor == pytest.approx(3.1)
    assert found.useless == ["compute"]
    assert found.unsettled == []
    # Those that fall ever faster have no floor.
    assert fit({"compute": [1.0, 2.0, 4.0]}, [3.0, 2.9, 2.0]).floor == 0.0


def test_what_the_models_cannot_tell_is_refused() -> None:
    amounts = {"compute": [1.0, 2.0, 2.0], "rows": [5.0, 5.0, 5.0]}
    assert lacking(amounts) == {"compute": 1, "rows": 2}
    with pytest.raises(ValueError, match=r"^compute: 1 more different amounts, rows: 2 more different amounts$"):
        fit(amounts, [3.0, 2.0, 2.0])
    three = [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match=r"^5 models are needed, and there are 3$"):
        fit({"compute": three, "rows": three}, [3.0, 2.0, 1.5])


def test_a_law_predicts_by_its_formula() -> None:
    found = Law(1.0, {"compute": 2.0, "rows": 0.5}, {"compute": 0.5, "rows": 1.0}, {"compute": 4.0, "rows": 10.0}, 0.0)
    # 1 + 2 / sqrt(16 / 4) + 0.5 / (20 / 10).
    assert found.predict({"compute": 16.0, "rows": 20.0}) == pytest.approx(2.25)


def point(name: str, compute: float, loss: float, family: str = "dense", **amounts: float) -> Point:
    return Point(name, family, {"compute": compute, **amounts}, loss, 1)


def sizes(family: str = "dense", **amounts: float) -> list[Point]:
    """Four sizes of the law 2 + 1 / sqrt(C)."""
    return [point(f"{family}_{n}", 4.0**n, 2 + 2.0**-n, family, **amounts) for n in range(4)]


def test_the_largest_is_held_out_and_predicted() -> None:
    text = report(fits(sizes()))
    assert "| dense | dense_0, dense_1, dense_2 | 2.000 + 1 / C^0.500 | 0.0000 |" in text
    assert "| dense_3 | 4.0 | 2.1250 | 2.1250 |" in text
    # What a law has to beat: the largest model that it was fitted to.
    assert text.rstrip().endswith("| +0.1250 |")


def test_terms_that_say_nothing_are_named() -> None:
    """Losses that rows raise, and that fall by as much with each fourfold of compute: no power does that."""
    grid = [(n, 10.0**r) for n in range(4) for r in range(1, 4)]
    points = [
        point(f"m{i}", 4.0**n, 3 - 0.01 * n + rows / 1e4, "memory", rows=rows, reads=16.0)
        for i, (n, rows) in enumerate(grid)
    ]
    text = report(fits(points, ["m11"]))
    assert "- memory: more rows do not lower these losses" in text
    assert "- memory: these losses leave the exponent of compute open" in text
    assert " / N^" not in text


def test_others_may_be_held_out() -> None:
    text = report(fits(sizes(), ["dense_0"]))
    assert "| dense | dense_1, dense_2, dense_3 | 2.000 + 1 / C^0.500 |" in text
    assert "| dense_0 | 0.0 | 3.0000 | 3.0000 |" in text
    with pytest.raises(ConfigError, match=r"^--hold-out names other, which has no finished run; there are dense_0, "):
        report(fits(sizes(), ["other"]))


def test_what_is_missing_is_said() -> None:
    text = report(fits([*sizes()[:3], *sizes("memory", rows=100.0, reads=16.0)]))
    assert "- dense, no fit: compute: 1 more different amounts" in text
    assert "- memory: rows have no term, for there are models of 100 alone: train 2 other amounts" in text
    assert "| memory | memory_0, memory_1, memory_2 | 2.000 + 1 / C^0.500 |" in text


def test_rows_have_a_term_where_they_differ() -> None:
    grid = [(4.0**n, 10.0**r) for n in range(3) for r in range(1, 4)]
    points = [point(f"m{i}", c, 2 + c**-0.5 + r**-1, "memory", rows=r, reads=16.0) for i, (c, r) in enumerate(grid)]
    unseen = point("unseen", 64.0, 2 + 64**-0.5 + 1e-4, "memory", rows=1e4, reads=16.0)
    text = report(fits([*points, unseen]))
    assert " / N^" in text
    assert "| unseen | 4.0 | 2.1251 | 2.12" in text
    assert "reads have no term" in text


def test_a_picture_has_a_line_where_there_is_a_law() -> None:
    (axes,) = picture(fits([*sizes()[:2], *sizes("memory", rows=100.0, reads=16.0)])).axes
    dense, seen, held, law, *_ = axes.lines
    assert (dense.get_linestyle(), dense.get_label()) == ("None", "dense")
    assert (seen.get_fillstyle(), held.get_fillstyle()) == ("full", "none")
    compute, losses = law.get_xydata()[:, 0], law.get_xydata()[:, 1]
    assert (compute[0], compute[-1]) == pytest.approx((1.0, 64.0))
    assert losses == pytest.approx(2 + compute**-0.5, abs=1e-3)
