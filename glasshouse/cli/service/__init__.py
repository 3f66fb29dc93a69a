"""The commands that run the service on this machine: start, stop, status, backup, doctor.

They start or look at processes on this machine. All other commands only make requests.
"""
