"""How the arguments of `Client.train` and `Client.infer` become a spec.

Also what identifies the data that is given. Modules of torch are read in ``modules``.
"""
