"""Device code: Triton functions and their launchers. Imported only where Triton runs.

Legend of what they take: a tensor is seen as ``outer`` x ``n`` x ``inner`` with the strides ``so``,
``sn``, ``si`` in elements; a tile is ROWS rows of BLOCK elements each. Constants of compilation are in
capitals.
"""
