"""The custom ops of the kernels, `torch.ops.megamem`: what `torch.compile` takes as it is.

Defined by `torch.library.Library` and not by `torch.library.custom_op`: a call takes the host 4 us where that takes 15 to
31, and the host issues dozens of calls for every block of a model. Ops know nothing of autograd; gradients are functions
of it that call ops both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_NAMESPACE = "megamem"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_BODIES: dict[str, Callable[..., Any]] = {}

Body = TypeVar("Body", bound=Callable[..., Any])


def custom_op(
    name: str, fake: Callable[..., Any] | None = None, *, mutates: Sequence[str] = (), schema: str | None = None
) -> Callable[[Body], Body]:
    """Decorator that makes a function of tensors an op. Calls give arguments by position, or by name.

    Args:
        name: name in PyTorch's namespace `megamem`.
        fake: allocates the results, for tensors without data; None: the op returns nothing.
        mutates: names of arguments that are written to.
        schema: signature, with such arguments as `Tensor(a!)`; None: that of the function's annotations.
    """

    def define(body: Body) -> Body:
        signature = schema or torch.library.infer_schema(body, mutates_args=mutates)
        _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        op = getattr(getattr(torch.ops, _NAMESPACE), name).default
        written = [at for at, argument in enumerate(op._schema.arguments) if argument.is_write]
        assert len(written) == len(mutates)
        implementation = _marking(body, written) if written else body
        # For every device: on the CPU Triton's interpreter runs, and on "meta" the fake.
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake or _nothing, lib=_LIBRARY)
        _BODIES[op._schema.name] = body
        return cast(Body, op)

    return define


def body_of(op: Any) -> Callable[..., Any]:
    """The function that an op of this namespace was made of, or any other function as it is."""
    body: Callable[..., Any] = _BODIES[op._schema.name] if isinstance(op, torch._ops.OpOverload) else op
    return body


def needs_gradient(*operands: Tensor) -> bool:
    """True where autograd is to know of a result: elsewhere an op is called without a node of its graph."""
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def _marking(body: Callable[..., None], written: Sequence[int]) -> Callable[..., None]:
    """Have autograd know that tensors were written to, so that it refuses to read what it had saved of them."""

    def run(*operands: Any) -> None:
        body(*operands)
        for at in written:
            increment_version(operands[at])

    return run


def _nothing(*operands: Any) -> None:
    return None
