"""Render tensors and series as images, tables and files."""
