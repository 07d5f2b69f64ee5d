from contextlib import contextmanager


class CudaRNGStatesTracker:
    pass


@contextmanager
def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    yield
