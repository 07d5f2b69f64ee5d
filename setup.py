"""Names of our packages where they are installed: `megamem`, and `megamem_rooms` with the others inside.

`kernels` is a distribution of Hugging Face's, and anybody has a `tools`: two of a name would overwrite each other's files
in an environment, and hide each other. `megamem.packages` finds the others in both places.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOMS = ("kernels", "parallel", "pretrain", "slurm", "tools")


def within(*rooms: str) -> list[str]:
    """Packages of some of the top-level folders."""
    return find_packages(include=[pattern for room in rooms for pattern in (room, f"{room}.*")])


def folders_of(data: str) -> list[str]:
    """A folder of files, and those below it, as packages without code."""
    return [
        found.as_posix().replace("/", ".") for found in [Path(data), *sorted(Path(data).rglob("*"))] if found.is_dir()
    ]


setup(
    packages=[
        *within("megamem"),
        *(f"megamem_rooms.{package}" for package in (*within(*ROOMS), *folders_of("configs"))),
    ],
    package_dir={f"megamem_rooms.{room}": room for room in (*ROOMS, "configs")},
)
