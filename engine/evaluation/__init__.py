"""Evaluate a trained network: losses, metrics, confusion, curves, calibration, worst samples.

Rows are read once, a batch at a time, and everything is a sum over batches, so that memory does not
grow with the rows. What inference returns of a network is in ``engine.inference``.
"""
