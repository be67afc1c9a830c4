"""Kernels on the host: compiled by its C++ compiler (`compiler.py`), run by `runtime.cpp`, launched by `kernel.py`."""
