"""Joins of evidence from several sources: one module a rule, :mod:`.driver` applies them in order of strength."""
