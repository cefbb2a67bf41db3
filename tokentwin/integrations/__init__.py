"""Policies of this project in other engines."""
