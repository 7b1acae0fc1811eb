"""Torchstone: the fastest version of a PyTorch model that it can prove right.

``import torchstone`` loads neither torch nor any engine.
"""

__version__ = "0.1.0"
