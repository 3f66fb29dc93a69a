"""Kernels in C++: built if there is a compiler; otherwise torch does their work."""
