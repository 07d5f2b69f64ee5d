"""Pages of HTML: jinja2's templates, which escape what they are given, unless they say `safe`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_FOLDER = Path(__file__).parent


def render(template: str, folder: Path = _FOLDER, **values: Any) -> str:
    """Fill one of the templates beside this file, or one of another folder, which may use these."""
    return _environment(folder).get_template(template).render(**values)


@cache
def _environment(folder: Path) -> Environment:
    loader = FileSystemLoader([folder, _FOLDER])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
