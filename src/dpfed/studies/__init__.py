"""Comparisons of methods: the command `dpfed compare`."""
