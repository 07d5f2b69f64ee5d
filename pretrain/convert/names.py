"""The names of formats, as in `--format`. Imports nothing, so that the command line is built at once."""

NATIVE, HUGGINGFACE, MEGATRON_RANKS, RELEASED = "megatron-dist", "huggingface", "megatron-ranks", "released"

FORMAT_NAMES = (NATIVE, HUGGINGFACE, MEGATRON_RANKS, RELEASED)
"""The first is the default."""
