"""A program that stands in for the interpreter of an environment with an engine, and writes down how it was called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import json, os, sys
if sys.argv[1] == "-c":
    print(json.dumps([name for name in sys.argv[3:] if name in {modules}]))
else:
    called = {{"words": sys.argv[1:], "safe_path": os.environ.get("PYTHONSAFEPATH")}}
    open({log}, "w").write(json.dumps(called))
    sys.exit(7)
"""


def engine_stand_in(folder: Path, *modules: str) -> tuple[Path, Path]:
    """The program, which has some modules and ends with 7 as a server, and the JSON file that it writes."""
    folder.mkdir(exist_ok=True)
    program, log = folder / "python", folder / "called.json"
    program.write_text(_PROGRAM.format(python=sys.executable, modules=json.dumps(modules), log=json.dumps(str(log))))
    program.chmod(0o755)
    return program, log
