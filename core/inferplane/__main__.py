"""`python -m inferplane` is the command `inferplane`."""

from inferplane.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
