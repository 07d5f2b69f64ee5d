"""Words by which a rank says no more than that another one is gone. It imports no torch."""

from __future__ import annotations

# Raised as plain RuntimeErrors by collectives whose peer is gone.
_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "connection closed by remote peer",
    "connection was likely closed",
    "remote process exited",
    "remote process exiting",
    "nccl communicator was aborted",
)


def says_peer_is_gone(text: str) -> bool:
    """Tell whether the message of an error is that of a lost connection to another rank."""
    return any(phrase in text.lower() for phrase in _TEXTS)
