"""The database and the files of the service: tables, every query, settings. Imports no torch."""
