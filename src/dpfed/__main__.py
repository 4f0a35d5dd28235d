"""Run the command line `dpfed` for `python -m dpfed`."""

from dpfed.cli.main import main

if __name__ == "__main__":
    main()
