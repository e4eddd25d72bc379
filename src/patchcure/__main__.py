"""`python -m patchcure` is `patchcure`."""

from patchcure.cli import main

if __name__ == "__main__":
    main()
