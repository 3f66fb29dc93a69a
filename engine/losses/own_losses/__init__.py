"""Losses that torch does not have. A module registers its classes by type as ``LOSSES``.

A class is called as torch's losses are, returns one number, and has an attribute ``reduction`` of
``mean`` or ``sum`` over the rows. The first line of its docstring is its summary in the catalog.
"""
