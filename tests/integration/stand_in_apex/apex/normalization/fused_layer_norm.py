import stand_in_log
import torch
import torch.nn.functional as F


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    if torch.is_grad_enabled():
        # Not in evaluation.
        stand_in_log.write("fused_rms_norm_affine")
    # The kernels take one dtype; there is another function for two.
    assert input.dtype == weight.dtype
    assert not memory_efficient
    return F.rms_norm(input, normalized_shape, weight, eps)
