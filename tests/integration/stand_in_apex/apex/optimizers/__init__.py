import stand_in_log
import torch


class FusedAdam(torch.optim.Optimizer):
    """Apex's, whose groups count their updates, and whose parameters do not."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0
    ):
        assert bias_correction
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        stand_in_log.write("FusedAdam")
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                assert set(state) == {"exp_avg", "exp_avg_sq"}
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                size = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt_() + group["eps"]
                p.sub_(mean / size + group["weight_decay"] * p, alpha=group["lr"])


class FusedSGD(torch.optim.SGD):
    pass
