"""`megamem study fit`: losses of several sizes, and the law that predicts the next."""
