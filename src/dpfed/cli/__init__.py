"""The command line: one thin file per command. They parse, call the engine and print; nothing is computed here."""
