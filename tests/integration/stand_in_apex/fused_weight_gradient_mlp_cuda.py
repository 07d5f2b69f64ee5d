import stand_in_log
import torch


def wgrad_gemm_accum_fp32(input, d_output, d_weight):
    stand_in_log.write("wgrad_gemm_accum_fp32")
    assert d_weight.dtype == torch.float32
    rows = d_output.flatten(0, -2)
    d_weight += (rows.t() @ input.flatten(0, -2)).float()
