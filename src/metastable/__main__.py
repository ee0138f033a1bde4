"""`python -m metastable` is `metastable`."""

from metastable.cli.main import main

if __name__ == "__main__":
    main()
