"""The commands that submit, follow, control and inspect jobs.

Those for other resources are in ``resources``.
"""
