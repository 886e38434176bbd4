"""Copies of saves in object stores, there and back."""
