"""Measurement: interleaved samples, their statistics, open-loop load and cost.

``clock`` and ``sample`` measure, ``jobs`` is what runs inside workers, and ``stats``, ``load`` and
``cost`` are pure. Nothing here imports torch except ``jobs``.
"""
