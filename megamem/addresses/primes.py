"""Prime numbers, which sizes of hashed tables are."""

from __future__ import annotations

from functools import lru_cache

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Miller-Rabin with these bases is exact below 3.3e24."""


def is_prime(number: int) -> bool:
    """Tell whether a number below 3.3e24 is prime."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=64)
def largest_prime(limit: int) -> int:
    """The largest prime up to `limit`, which is at least 2."""
    assert limit >= 2, f"there is no prime up to {limit}"
    return next(number for number in range(limit, 1, -1) if is_prime(number))
