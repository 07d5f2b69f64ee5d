"""Distributions of initial weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """U(low, high)."""

    high: float
    low: float = 0.0


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


Distribution = Normal | Uniform | Constant


def symmetric(bound: float) -> Uniform:
    """U(-bound, bound)."""
    return Uniform(low=-bound, high=bound)
