"""Calls of ATen operations: names, tensors, FLOPs and bytes, from their arguments alone."""
