"""Optimizers, learning-rate schedulers, gradient clipping and scaling, by torch's names.

What a layer sets for its own parameters (``parameter_options``) is here, too.
"""
