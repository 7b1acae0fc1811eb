"""What ``torch.compile`` makes of a model: graph breaks, recompiles, stale answers."""
