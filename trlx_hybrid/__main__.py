"""`python -m trlx_hybrid` is `trlx-hybrid`."""

import sys

from .cli import main

sys.exit(main())
