"""What a command prints and returns: tables, JSON, errors, exit codes, figures, help.

Nothing here makes a request.
"""
