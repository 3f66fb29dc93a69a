"""What users type after a command: references to jobs and layers, ``key=value``, completions.

Options that every command has are in ``terminal``.
"""
