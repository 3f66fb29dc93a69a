"""Losses by torch's names, each with the denominator of its mean, so that batches can be split."""
