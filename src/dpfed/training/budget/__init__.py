"""The privacy spending of a run: planned before it, charged during it, and read back from it."""
