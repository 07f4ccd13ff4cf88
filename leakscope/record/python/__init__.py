"""Python frames: which processes run CPython, how its structures are laid out, and what its code objects are called."""
