"""Modules of the commands that the laboratory adds to `megamem`, in the order of `--help`. Entry points name these."""

COMMANDS = (
    "lab.suite.command",
    "lab.gpu_check.command",
)

STUDIES = (
    "lab.studies.compare.command",
    "lab.studies.fit.command",
    "lab.studies.recall.command",
    "lab.studies.teach.command",
    "lab.studies.probe.command",
    "lab.studies.analyse.command",
    "lab.stand_in.command",
    "lab.bench.command",
)
"""Commands of `megamem study`."""
