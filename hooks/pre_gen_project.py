"""Refuse answers that would make a project which cannot work."""
