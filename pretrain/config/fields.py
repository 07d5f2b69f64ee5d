"""Types of values that more than one file of the configuration knows."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator

FolderPath = Annotated[str, AfterValidator(lambda path: path and os.path.abspath(os.path.expanduser(path)))]
"""A folder, found from anywhere once the configuration is read: not resolved, as a link may lead elsewhere on nodes."""
FilePath = FolderPath
"""A file, found from anywhere likewise."""
ApexPart = Literal["norms", "weight_gradients", "adamw"]
Shuffle = Literal["documents", "samples"]
PLAIN_NAME = re.compile(r"[\w.+=-]+")
"""Names of runs and stages, which stand in paths, command lines and batch scripts."""
