"""Pages, tables and drawings of records and runs."""
