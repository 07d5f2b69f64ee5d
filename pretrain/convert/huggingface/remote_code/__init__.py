"""The model for transformers, copied into exported folders as it is. It imports torch and transformers alone."""
