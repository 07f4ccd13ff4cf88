"""Joins: from the tables of a capture to sites, chains and reconciliations. Tables in, tables out."""
