"""`python -m lab`: `megamem` with the laboratory's commands, in a checkout of which neither has to be installed."""

from __future__ import annotations

import argparse
import sys

from lab.commands import COMMANDS, STUDIES
from megamem.start import main


def _parser() -> argparse.ArgumentParser:
    # Imported when `megamem.start` has put our packages first.
    from tools.cli import build_parser

    return build_parser(COMMANDS, STUDIES)


if __name__ == "__main__":
    sys.exit(main(parser=_parser))
