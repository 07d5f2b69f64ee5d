"""The memory kernels in C++: `rows.cpp`, compiled once per machine by `build.py`, called by `ops.py`. See kernels/README.md."""
