import os
from pathlib import Path


def write(name):
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        log.write(f"{name}\n")
