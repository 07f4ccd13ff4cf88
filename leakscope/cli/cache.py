"""``leakscope cache``: forensics of caches, one command a question.

The commands parse, call a service of :mod:`leakscope.cache` and render; what they need is imported when they run.
"""

from __future__ import annotations

import typer

cache = typer.Typer(
    help="Forensics of caches: replay a trace under eviction policies, check keys, lifetimes and consistency.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@cache.callback()
def _cache() -> None:
    pass
