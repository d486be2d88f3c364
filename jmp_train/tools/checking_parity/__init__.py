"""Compares the log-probabilities of two functions, and finds the operations where they diverge."""
