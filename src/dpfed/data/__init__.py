"""Read records from sources and divide them among clients."""
