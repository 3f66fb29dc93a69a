"""The blocking client, generated from ``aio``: change the module of the same name there.

Only ``running.py``, which defines how to wait, is written by hand. What both clients share is not
here but in the folders below.
"""
