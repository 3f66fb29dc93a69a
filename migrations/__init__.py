"""One linear history of the database, for SQLite and PostgreSQL."""
