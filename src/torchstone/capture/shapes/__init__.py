"""Dynamic shapes made sound: what a capture holds for, how to compile, refusals in plain words."""
