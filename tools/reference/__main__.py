"""Writes the pages of docs/reference: ``python -m tools.reference``."""

from __future__ import annotations

from tools.reference import FOLDER, ROOT, pages

FOLDER.mkdir(exist_ok=True)
for name, text in pages().items():
    path = FOLDER / name
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
