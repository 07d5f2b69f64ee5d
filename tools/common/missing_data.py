"""Advice where a configuration names data by a path that leads nowhere from the folder of the command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pretrain.data.manifest import MANIFEST_FILE
from pretrain.errors import MissingDataError


def advice_on_path(error: MissingDataError, configs: Sequence[str]) -> str:
    """A sentence on what relative paths count from; it names the data set if that is beside a configuration.

    Args:
        error: names the folder that was looked for.
        configs: files of the command's configurations, in and above whose folders it is looked for.

    Returns:
        The sentence with a space before it; empty if the path is from no configuration, or was absolute.
    """
    here = Path.cwd()
    if not configs or not error.folder.is_relative_to(here):
        return ""
    sentence = f" A relative path counts from the folder in which the command starts, {here}"
    name = error.folder.relative_to(here)
    folders = [above for config in configs for above in Path(os.path.abspath(config)).parents]
    for above in folders:
        if above != here and (above / name / MANIFEST_FILE).is_file():
            return f"{sentence}: there is {above / name}, so start it in {above}, or give that path."
    return f"{sentence}."
