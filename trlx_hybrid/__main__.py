"""The entry point of `python -m trlx_hybrid`, which runs `trlx-hybrid`."""

import sys

from .commands.main import main

sys.exit(main())
