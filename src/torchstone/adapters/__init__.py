"""Kernels of other systems, made tunable: Triton's and Helion's."""
