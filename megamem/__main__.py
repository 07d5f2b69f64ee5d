"""`python -m megamem`: the program, for a launcher that starts modules."""

import sys

from megamem.start import main

sys.exit(main())
