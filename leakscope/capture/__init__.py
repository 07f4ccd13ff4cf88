"""Captures: the one on-disk format of leakscope. A directory with a manifest and Parquet parts per table."""

from leakscope.capture.pack import MAX_UNPACKED_BYTES, pack, unpack
from leakscope.capture.reader import Capture
from leakscope.capture.writer import CaptureWriter

__all__ = ["MAX_UNPACKED_BYTES", "Capture", "CaptureWriter", "pack", "unpack"]
