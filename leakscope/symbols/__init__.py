"""Names and source lines of addresses, after the fact: ELF symbols, demangling, DWARF, separate debug files.

Nothing here needs a live process, root or the machine of the recording.
"""
