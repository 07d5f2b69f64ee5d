class FusibleOperation:
    pass


class Sequential:
    pass
