"""`nibblelm convert` from a checkout: python scripts/convert.py SRC DST [flags]."""

import sys

from nibblelm.cli import main

sys.exit(main(["convert", *sys.argv[1:]]))
