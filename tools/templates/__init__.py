"""Pages of HTML: jinja2's templates, which escape what they are given, unless they say `safe`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Fill one of the templates beside this file."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
