"""Renderings of results. Pure functions of result types; they read nothing and print nothing."""
