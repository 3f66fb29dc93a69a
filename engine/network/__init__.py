"""From the graph of a spec to a torch module: layers, functions, shapes, recurrent layers, lengths.

Losses are in ``engine.losses``, native kernels in ``engine.native``.
"""
