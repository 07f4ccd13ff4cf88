"""GPU kernels of a target: their images, names and parameters, and the arguments of their launches."""
