"""Constants of the n-gram hashes: multipliers, and the prime sizes of the heads' tables.

Both follow from the configuration alone, to the bit of the public codes. Legend: N highest order, K heads per order,
H = (N - 1) K heads, p rows of a head, U token ids that are hashed.
"""

from __future__ import annotations

from collections.abc import Sequence

from megamem.addresses.primes import is_prime

_LAYER_STRIDE = 10007
"""Seeds of neighbouring layers are so far apart, in both codes."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def multipliers_of(rules: str, num: int, num_ids: int, seed: int, layer_index: int, block: int) -> tuple[int, ...]:
    """Odd multipliers of a layer, by the rules of `EngramConfig`: the layer's number among the memory layers, or its block,
    goes into their seed."""
    if rules == "ple":
        return splitmix_multipliers(num, num_ids, seed, layer_index)
    return numpy_multipliers(num, num_ids, seed, block)


def numpy_multipliers(num: int, num_ids: int, seed: int, layer_id: int) -> tuple[int, ...]:
    """Odd multipliers of the current token and of its predecessors, in Engram's demo: NumPy's PCG64 draws them."""
    import numpy as np

    generator = np.random.default_rng(seed + _LAYER_STRIDE * layer_id)
    draws = generator.integers(low=0, high=_half(num_ids), size=num, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def splitmix_multipliers(num: int, num_ids: int, seed: int, layer_index: int) -> tuple[int, ...]:
    """Odd multipliers in Qwen's PLE: SplitMix64 of a counter draws them; `layer_index` counts its layers from 0."""
    base = seed + _LAYER_STRIDE * layer_index
    draws = (_splitmix64(base + _GOLDEN_GAMMA * (i + 1)) % _half(num_ids) for i in range(num))
    return tuple(2 * draw + 1 for draw in draws)


def _half(num_ids: int) -> int:
    """Half of the largest factor by which no token id overflows a signed 64-bit number."""
    return max(1, ((2**63 - 1) // num_ids) // 2)


def _splitmix64(x: int) -> int:
    z = (x + _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def head_sizes(budgets: Sequence[int], heads_per_order: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each head, by layer, order-major: primes that no other head of the model has.

    A head takes the smallest prime from its order's budget on that is still free. With one budget for all orders, head
    h of layer l has the (l H + h + 1)-th prime from there on, which is Qwen's rule too.
    """
    used: set[int] = set()
    next_of = dict.fromkeys(budgets, 0)
    layers = []
    for _ in range(num_layers):
        sizes = []
        for budget in budgets:
            candidate = max(budget, next_of[budget])
            for _ in range(heads_per_order):
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                sizes.append(candidate)
            next_of[budget] = candidate
        layers.append(tuple(sizes))
    return tuple(layers)
