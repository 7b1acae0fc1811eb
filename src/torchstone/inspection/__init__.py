"""What a model is before anything is optimized, and where it will not go through a compiler."""
