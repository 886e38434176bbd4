"""Tuning: communication settings with reasons, and what to expect of them."""
