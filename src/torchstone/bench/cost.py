"""What calls cost, and when a build has paid for itself. Pure."""

from __future__ import annotations

from torchstone.errors import InputError

__all__ = ["break_even_calls", "capacity", "dollars_per_million"]


def capacity(seconds_a_call: float) -> float:
    """Calls a second that one process answers when it is never idle.

    :param seconds_a_call: mean seconds of a call over the traffic's mix.
    :raises InputError: unless it is positive and finite.
    """
    if not 0 < seconds_a_call < float("inf"):
        raise InputError(f"seconds a call must be positive and finite, got {seconds_a_call!r}")
    return 1 / seconds_a_call


def dollars_per_million(dollars_per_hour: float, seconds_a_call: float) -> float:
    """Dollars per million requests on a machine kept busy by one process."""
    return dollars_per_hour / 3600 * 1e6 / capacity(seconds_a_call)


def break_even_calls(extra_build_s: float, seconds_saved_a_call: float) -> float | None:
    """Calls after which the time spent on building is earned back.

    :param extra_build_s: build seconds of the candidate less those of the baseline.
    :param seconds_saved_a_call: seconds a call of the baseline less those of the candidate.
    :returns: 0 if the candidate builds no slower; None if it saves nothing, and so never.
    """
    if seconds_saved_a_call <= 0:
        return None
    return max(0.0, extra_build_s) / seconds_saved_a_call
