"""`python -m pyllm` is `pyllm`."""

from pyllm.commands import main

if __name__ == "__main__":
    main()
