"""The names of formats, as in `--format`. Imports nothing, so that the command line is built at once."""

NATIVE, HUGGINGFACE, RELEASED = "megatron-dist", "huggingface", "released"
MEGATRON_LM = "megatron-lm"
"""Only read."""

FORMAT_NAMES = (NATIVE, HUGGINGFACE, RELEASED)
"""The first is the default."""
