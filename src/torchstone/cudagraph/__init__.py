"""CUDA graphs: the launches of a call recorded once and replayed as one."""
