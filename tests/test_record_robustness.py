"""What record leaves behind when it is interrupted, killed, out of disk, or asked for the impossible."""
