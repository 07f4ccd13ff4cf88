"""Judgements: from sites and their curves to verdicts. Tables in, results out."""
