"""`megamem probe`: what a model can use of a long context."""
