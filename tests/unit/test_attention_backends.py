"""Kernels of PyTorch that attention may take in a run on a GPU, and what is said where none fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megamem.attention.backends import NoFusedAttentionError, fused_attention
from pretrain.config.stages import load_config
from pretrain.engine.session import attention_without_scores
from pretrain.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SWITCHES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuDNN": torch.backends.cuda.cudnn_sdp_enabled,
    "plain": torch.backends.cuda.math_sdp_enabled,
}


def allowed() -> set[str]:
    return {name for name, is_enabled in SWITCHES.items() if is_enabled()}


def test_the_plain_products_are_left_out_and_come_back() -> None:
    before = allowed()
    assert "plain" in before
    with fused_attention():
        assert allowed() == set(SWITCHES) - {"plain"}
    assert allowed() == before


def test_what_no_fused_kernel_can_do_is_refused() -> None:
    """A mask with a gradient is for the plain products alone, on every device."""
    x, mask = torch.zeros(1, 2, 4, 8), torch.zeros(4, 4, requires_grad=True)
    assert F.scaled_dot_product_attention(x, x, x, attn_mask=mask).shape == x.shape
    with pytest.raises(NoFusedAttentionError, match="no fused attention"), fused_attention():
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    config = load_config(QUICKSTART, ["model.num_query_groups=2", "model.head_dim=36"])
    with (
        pytest.raises(ConfigError, match=r"4 of 36 dimensions, with 2 heads of keys, in bf16\. Set model\.head_dim"),
        attention_without_scores(config),
    ):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    with pytest.raises(RuntimeError, match="another"), fused_attention():
        raise RuntimeError("another")
    assert "plain" in allowed()
