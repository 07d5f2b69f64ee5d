class DelayedScaling:
    pass
