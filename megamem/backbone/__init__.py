"""The backbone, in Megatron's modules and ours: the specs and parts of its blocks, norms, feed-forwards, experts, losses."""
