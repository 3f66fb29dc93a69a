"""Tensors and series as pictures, tables and files."""
