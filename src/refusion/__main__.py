"""`python -m refusion`: the command line."""

import sys

from refusion.cli import main

sys.exit(main())
