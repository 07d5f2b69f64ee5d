import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from transformer_engine.pytorch import distributed, fp8, ops

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed", "fp8", "ops"]


class _WithExtraState(nn.Module):
    """Every module of Transformer Engine has an entry in state dicts for what fp8 needs; without fp8 it is empty.

    Who is made is written down, for the tests.
    """

    def __init__(self):
        super().__init__()
        with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
            log.write(f"{type(self).__name__}\n")

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or not state.numel()


class Linear(_WithExtraState):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        sequence_parallel,
        tp_group,
        tp_size,
        parallel_mode,
        bias,
        return_bias,
        params_dtype,
        device,
        fuse_wgrad_accumulation,
        **other,
    ):
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        assert not bias
        assert not return_bias
        self.sequence_parallel, self.tp_group, self.tp_size = sequence_parallel, tp_group, tp_size
        self.parallel_mode = parallel_mode
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        # The real ones start with values of their own, which nobody may rely on.
        nn.init.constant_(self.weight, 7.0)
        if parallel_mode is not None:
            self.weight.tensor_model_parallel = True
            self.weight.partition_dim = int(parallel_mode == "row")
            self.weight.partition_stride = 1

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        if self.tp_size == 1:
            return self._product(x)
        if self.parallel_mode == "column":
            enter = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            return self._product(enter(x, group=self.tp_group))
        leave = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region
        )
        return leave(self._product(x), group=self.tp_group)

    def _product(self, x):
        fuse = self.fuse_wgrad_accumulation and hasattr(self.weight, "main_grad")
        return _Fused.apply(x, self.weight) if fuse else F.linear(x, self.weight)


class _Fused(torch.autograd.Function):
    """A product whose weight's gradient is added to `main_grad`; autograd gets something of its shape, for hooks."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, of_out):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += of_out.flatten(0, -2).t() @ x.flatten(0, -2)
        ctx.weight.grad_added_to_main_grad = True
        return of_out @ ctx.weight, torch.full_like(ctx.weight, float("nan"))


class LayerNormLinear(_WithExtraState):
    def __init__(self, *arguments, **keywords):
        raise NotImplementedError("the product keeps norms apart from linears")


class GroupedLinear(LayerNormLinear):
    pass


class RMSNorm(_WithExtraState):
    def __init__(
        self,
        normalized_shape=None,
        *,
        eps,
        sequence_parallel,
        zero_centered_gamma,
        params_dtype,
        device,
        hidden_size=None,
    ):
        super().__init__()
        hidden_size = normalized_shape or hidden_size
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    pass


class DotProductAttention(_WithExtraState):
    def __init__(self, *, num_attention_heads, kv_channels, attn_mask_type, num_gqa_groups, tp_size, **other):
        super().__init__()
        assert attn_mask_type == "causal"

    def forward(self, query, key, value, attention_mask, *, attn_mask_type):
        assert attention_mask is None
        assert attn_mask_type == "causal"
        s, b, n, d = query.shape
        heads = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=key.shape[2] != n)
        return out.permute(2, 0, 1, 3).reshape(s, b, n * d)
