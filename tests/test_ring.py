"""The ring buffer reader on a real BPF ring, and the whole recorder when its ring overflows."""
