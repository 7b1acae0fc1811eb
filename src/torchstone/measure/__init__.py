"""Measuring configs: built ahead, proved against float64, timed, in processes that may die."""
