"""``python -m hal``: the console script ``hal``."""

from hal_command import main

main()
