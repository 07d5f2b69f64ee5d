"""What goes into an exported folder as it is: the model for transformers. It imports torch and transformers alone."""
