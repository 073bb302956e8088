"""`python -m jackline` is `jackline`."""

from jackline.cli.main import main

if __name__ == "__main__":
    main()
