"""Which part of a rank an allocation belongs to: decided by the innermost line of code that a reader would name."""

from __future__ import annotations

import sys
from types import CodeType

from pretrain.costs.memory import MemoryPart

# The ends of paths, the first that matches. Linears and norms are called from everywhere: their callers decide.
_BY_PATH = (
    ("/pretrain/value_offload.py", MemoryPart.HOST),
    ("/parallel/exchange.py", MemoryPart.EXCHANGE),
    ("/parallel/sharded_bank.py", MemoryPart.EXCHANGE),
    ("/parallel/packed_rows.py", MemoryPart.EXCHANGE),
    ("/parallel/context.py", MemoryPart.ATTENTION),
    ("/megamem/attention.py", MemoryPart.ATTENTION),
    ("/megamem/chunked_loss.py", MemoryPart.LOSS),
    ("/megamem/layers/", MemoryPart.MEMORY),
    ("/megamem/families/", MemoryPart.MEMORY),
    ("/megamem/retrieval/", MemoryPart.MEMORY),
    ("/megamem/shuffle.py", MemoryPart.MEMORY),
    ("/megamem/losses.py", MemoryPart.MEMORY),
    ("/kernels/", MemoryPart.MEMORY),
    ("/megatron/core/tensor_parallel/cross_entropy.py", MemoryPart.LOSS),
    ("/megatron/core/models/common/language_module/", MemoryPart.LOSS),
    ("/megatron/core/transformer/attention.py", MemoryPart.ATTENTION),
    ("/megatron/core/transformer/mlp.py", MemoryPart.FEED_FORWARD),
    ("/megatron/core/transformer/moe/", MemoryPart.FEED_FORWARD),
    ("/megatron/core/pipeline_parallel/p2p_communication.py", MemoryPart.MESSAGES),
    ("/megatron/core/transformer/transformer_layer.py", MemoryPart.RESIDUAL),
    ("/megatron/core/transformer/transformer_block.py", MemoryPart.RESIDUAL),
    ("/megatron/core/models/common/embeddings/rope_utils.py", MemoryPart.ATTENTION),
    ("/megatron/core/models/common/embeddings/", MemoryPart.RESIDUAL),
    ("/megamem/model.py", MemoryPart.LOSS),
    ("/megatron/core/models/gpt/gpt_model.py", MemoryPart.LOSS),
    ("/torch/autograd/", MemoryPart.BACKWARD),
)
_known: dict[CodeType, MemoryPart | None] = {}


def part_of_caller() -> MemoryPart:
    """The part that the innermost named line on the stack belongs to."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code not in _known:
            _known[code] = _part_of_path(code.co_filename)
        if (part := _known[code]) is not None:
            return part
        frame = frame.f_back  # type: ignore[assignment]
    return MemoryPart.OTHER


def _part_of_path(path: str) -> MemoryPart | None:
    # Calls of custom autograd functions and checkpoints pass through this file too: those of the engine alone count.
    if "/torch/autograd/" in path and not path.endswith(("/graph.py", "/__init__.py")):
        return None
    return next((part for fragment, part in _BY_PATH if fragment in path), None)
