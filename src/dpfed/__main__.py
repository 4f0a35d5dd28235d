"""`python -m dpfed`, the same as `dpfed`."""

from dpfed.cli.main import main

if __name__ == "__main__":
    main()
