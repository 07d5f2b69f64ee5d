"""The `megamem data` command: corpora, tokenizers and prepared data sets."""
