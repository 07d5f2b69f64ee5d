"""Studies: models compared, questioned and looked into. No run needs them, and nothing imports them."""
