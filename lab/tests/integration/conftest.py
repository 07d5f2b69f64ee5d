"""Commands on tiny models, for the laboratory's tests: those of the product's."""

from tests.integration.conftest import (
    config_file,
    corpus,
    made_once,
    megamem,
    own_mounts_are_allowed,
    place,
    refused,
    saved_run,
    start,
    trained,
    warm,
    words,
)

__all__ = [
    "config_file",
    "corpus",
    "made_once",
    "megamem",
    "own_mounts_are_allowed",
    "place",
    "refused",
    "saved_run",
    "start",
    "trained",
    "warm",
    "words",
]
