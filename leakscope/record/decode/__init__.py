"""From ring records to rows of the tables: vectorised, one module a kind of record."""
