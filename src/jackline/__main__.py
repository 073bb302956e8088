"""`python -m jackline` runs the `jackline` command."""

from jackline.cli.main import main

if __name__ == "__main__":
    main()
