"""The linear history of the database schema, for SQLite and PostgreSQL."""
