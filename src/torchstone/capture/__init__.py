"""Capture: the user's module as one exported program, or as regions where it cannot be one."""
