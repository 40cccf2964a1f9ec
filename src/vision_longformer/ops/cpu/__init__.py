"""One fused kernel in C++ (``csrc/``) for CPUs."""
