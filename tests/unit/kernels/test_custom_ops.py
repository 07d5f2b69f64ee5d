"""Custom ops: what tracing, autograd and dry runs are told of them, and functions of autograd that are made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.common.ops import body_of, custom_op
from kernels.implementations import Implementation, unavailable
from kernels.select import select_kernels

ENTRIES = torch.randint(0, 7, (2, 5, 3, 4), generator=torch.Generator().manual_seed(3))
TURNS = torch.rand(5, 1, 2, 8, generator=torch.Generator().manual_seed(4))


@custom_op("of_a_test_doubled", torch.empty_like)
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@custom_op("of_a_test_double", mutates=("x",))
def double(x: Tensor, times: int = 1) -> None:
    x.mul_(2**times)


def test_an_op_is_what_its_declaration_says() -> None:
    x = torch.ones(3)
    torch.library.opcheck(doubled, (x,))
    torch.library.opcheck(double, (x, 2))
    double(x=x)
    assert torch.equal(x, torch.full((3,), 2.0))
    assert doubled(x.to("meta")).shape == (3,)
    assert body_of(doubled).__name__ == "doubled"
    assert body_of(torch.add) is torch.add


def test_autograd_does_not_read_what_an_op_wrote_over() -> None:
    saved, factor = torch.ones(3), torch.ones(3, requires_grad=True)
    out = factor * saved
    double(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("implementation", "op", "shapes"),
    [
        ("triton", "swiglu", [(5, 2, 24)]),
        ("triton", "rms_norm", [(5, 2, 24), (24,)]),
        ("triton", "rotated_heads", [(5, 2, 4, 16), (5, 2, 2, 16), (16,), (16,)]),
        ("triton", "doubly_stochastic", [(5, 2, 3, 3)]),
        ("triton", "mix_streams", [(5, 3, 24), (5, 24), (5, 3), (5, 3, 3)]),
        ("triton", "weigh_streams", [(5, 3, 24), (5, 3)]),
        ("triton", "normal_product", [(5, 3, 24), (5, 24)]),
        ("triton", "tucker_scores", [(2, 5, 3, 7, 2), (2, 3, 2, 2)]),
        ("cpu", "tucker_scores", [(2, 5, 3, 7, 2), (2, 3, 2, 2)]),
    ],
)
def test_functions_of_autograd_are_traced_whole(
    implementation: Implementation, op: str, shapes: list[tuple[int, ...]]
) -> None:
    """Forward, backward, and where nothing needs a gradient."""
    if reason := unavailable(implementation, "cpu"):
        pytest.skip(reason)
    kernels = select_kernels(implementation, device_type="cpu")
    calls: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
        "swiglu": kernels.swiglu,
        "rms_norm": lambda x, gain: kernels.rms_norm(x, gain, 1e-5),
        "rotated_heads": lambda query, key, *gains: kernels.rotated_heads(query, key, TURNS, *gains, 1e-5),
        "doubly_stochastic": lambda logits: kernels.doubly_stochastic(logits, 4, 1e-6),
        "mix_streams": lambda *operands: kernels.mix_streams(*operands),
        "weigh_streams": lambda streams, weights: kernels.weigh_streams(streams, weights),
        "normal_product": lambda x, weight: kernels.normal_product(x, weight, 1e-5, centred=True),
        "tucker_scores": lambda scores, cores: kernels.tucker_scores(scores, cores, ENTRIES),
    }
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(*shape, generator=generator) for shape in shapes]

    def outcome(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in drawn]
        out = function(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        gradients = torch.autograd.grad([each.square().sum() for each in out], leaves)
        with torch.no_grad():
            alone = function(*leaves)
        return [*out, *gradients, *(alone if isinstance(alone, tuple) else (alone,))]

    traced = torch.compile(calls[op], fullgraph=True, backend="aot_eager")
    for found, expected in zip(outcome(traced), outcome(calls[op]), strict=True):
        assert torch.equal(found, expected)
