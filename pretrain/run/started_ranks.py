"""Ranks that a launcher has started, for commands: an environment that contradicts itself is a user's error. No torch."""

from __future__ import annotations

from parallel.processes.ranks import RankEnvironment, current_ranks
from pretrain.errors import ConfigError


def started_ranks() -> RankEnvironment | None:
    """This process's place among ranks that were already started; None if nobody started any.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    try:
        return current_ranks()
    except ValueError as error:
        raise ConfigError(str(error)) from error
