"""Names of the laboratory's packages where they are installed: beside those of `megamem`, in `megamem_rooms` (../setup.py)."""

from pathlib import Path

from setuptools import find_packages, setup

if __name__ == "__main__":
    # Packages without code.
    folders = [folder for folder in (Path("configs"), *sorted(Path("configs").rglob("*"))) if folder.is_dir()]
    found = [*find_packages(), *(folder.as_posix().replace("/", ".") for folder in folders)]
    setup(
        # Or this file, in the folder of a package, would be taken for a module of it.
        script_name="setup.py",
        packages=["megamem_rooms.lab", *(f"megamem_rooms.lab.{package}" for package in found)],
        package_dir={"megamem_rooms.lab": "."},
    )
