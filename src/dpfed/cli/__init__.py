"""The command line. Each command has one file, which reads options, calls dpfed and prints."""
