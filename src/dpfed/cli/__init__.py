"""The command line: one thin file per command, which parses, calls the engine and prints."""
