"""Scoring, choosing and moving the entries that survive."""
