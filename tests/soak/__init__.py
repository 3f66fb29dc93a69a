"""``python -m tests.soak``: a service in use and under fire for an hour; see ``__main__``."""
