"""The light engine: module and tensor hooks that leave the run bitwise as it is."""
