"""Importing reports of other tools into captures: the second door besides a live recording."""

from leakscope.ingest.files import Imported, Options, import_files, kind_of, refuse_unknown

__all__ = ["Imported", "Options", "import_files", "kind_of", "refuse_unknown"]
