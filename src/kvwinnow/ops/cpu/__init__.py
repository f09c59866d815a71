"""The native back end for CPUs: kernels in C++ (``native/``), called through ctypes; torch serves what they do not."""
