"""From program counters to frames: ELF files, the kernel's symbols, and the interner of frames and stacks."""
