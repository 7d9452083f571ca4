"""The entry point of `python -m trlx_hybrid`, which runs `trlx-hybrid`."""

import sys

from .cli import main

sys.exit(main())
