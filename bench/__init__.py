"""Benchmarks of docs/reference/measured.md, each a program: ``python -m bench.training.step``.

The folders are named for what is measured; ``results`` has the stored runs. No other package
imports this one, except tests.
"""
