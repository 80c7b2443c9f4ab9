"""`python -m deadweight` is the `deadweight` command."""

from deadweight.cli import main

if __name__ == "__main__":
    main()
