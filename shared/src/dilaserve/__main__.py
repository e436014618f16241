"""`python -m dilaserve`: the same as the `dilaserve` command."""

from dilaserve.cli import main

if __name__ == "__main__":
    main()
