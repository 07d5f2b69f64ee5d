"""Tables that the token id addresses: configs and layers of the families that mix them into attention's values."""
