"""For maintainers: whether plans agree with dry runs, and the pages that are computed from plans. No commands of `megamem`."""
