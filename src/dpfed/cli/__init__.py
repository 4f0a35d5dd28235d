"""The command line `dpfed`. Each command has one file, which reads options and prints results."""
