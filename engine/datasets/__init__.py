"""From an uploaded file to a dataset directory: readers by format, column statistics, the writer.

Runs in a separate process, without torch. ``engine.data`` reads the directories.
"""
