"""Metrics during training and of evaluations, derived series, sample predictions."""
