"""Bulk bytes and what is kept: artifacts, datasets, retention, pending deletions, disk space."""
