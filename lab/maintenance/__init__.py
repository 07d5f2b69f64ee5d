"""Scripts for maintainers: plans checked against dry runs, and pages computed from plans. No commands of `megamem`."""
