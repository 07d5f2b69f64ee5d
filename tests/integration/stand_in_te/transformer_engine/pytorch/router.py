def fused_topk_with_score_function(*arguments, **keywords):
    raise NotImplementedError("the product's router is not fused")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function
