"""Drift: compare the rows that a model is served with, with the rows that it was trained on.

`series` is what is compared: numbers and categories of fields and layers, one value for each row.
`histograms` divides them into bins and computes the population stability index and its threshold.
`reference` makes the histograms of the training rows and keeps them in a file. `watch` counts the
served rows, within a budget of time, and `findings` says what changed.
"""
