"""The tuner: a space, searchers that never measure, one loop, and a cache of all that was measured."""
