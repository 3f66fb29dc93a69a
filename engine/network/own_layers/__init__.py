"""Layers that torch does not have. A module registers its classes by type as ``LAYERS``.

The first line of a class's docstring is its summary in the catalog. A class that inherits
`engine.network.lengths.TakesLengths` gets the lengths of the rows.
"""
