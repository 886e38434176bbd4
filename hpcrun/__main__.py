"""`python -m hpcrun`: the command, where another program of that name comes first on PATH."""

from hpcrun.cli.main import main

if __name__ == "__main__":
    main()
